"""The engines of a run: their processes, the pool that dispatches requests to them, and the adapter they serve.

- `engine.py`, `types.py`: the interface of an engine. `sglang/` implements it; only `backend.py` imports `sglang/`.
- `pool.py`: dispatches requests, with `gate.py` (how many at a time) and `scheduling.py` (which next, and where).
- `decode.py`: what an engine records with a response. `adapters.py`: its adapter.
- `membership.py`, `engine_agent.py`, `engine_stay.py`: how engines join and stay, from the controller's side and their own.
  `engine_python.py`: the Python interpreter they run in.
- `nodes.py`: engines over several machines. `gathering.py`, `engine_node.py`: how their nodes start and end together, from the controller's
  side and their own.
"""
