"""The append-only log of a run: what was sampled, leased and trained, durable before it counts.

- `log`: one sequence of records of one writer; `files` and `redis` are its two backends.
- `turns`: the answers to episodes under way; `belonging`: of which run a log is.

What a queue tells it is in `asyncmoe.queue`: `records`, `payload`, `fold`, `queue_log`.

docs/log-format.md has the bytes.
"""
