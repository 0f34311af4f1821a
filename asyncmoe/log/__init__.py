"""The append-only log of a run: what was sampled, leased and trained, made durable before it takes effect.

- `log`: one writer's sequence of records; `files` and `redis` are its two backends.
- `turns`: the answers to unfinished episodes; `belonging`: the run that a log belongs to.

A queue's records are in `asyncmoe.queue`: `records`, `payload`, `fold`, `queue_log`.

docs/log-format.md documents the bytes.
"""
