"""SGLang 0.5.23 as an engine: implements `asyncmoe.engines.engine`; only `asyncmoe.engines.backend` imports it.

- `process.py`: one server as a child process: command line, environment, start and end.
- `connection.py`: HTTP requests and their errors.
- `generation.py`: the bodies of `/generate`; pure functions.
- `answer.py`, `streaming.py`: decode a response, packed or in JSON; pure functions.
- `weights.py`: pause, weight updates, checksums.
- `client.py`: all of these as an `Engine`; health, aborts, adapters.
- `lora.py`: server arguments and messages for adapters.

The code that changes the server's process is in `asyncmoe.platform.sglang` and `asyncmoe.weights.receiver`.
"""
