"""The append-only log of a run: what was sampled, leased and trained, durable before it counts.

- `log`: one sequence of records of one writer; `files` and `redis` are its two backends.
- `records`: what happens to groups, and the payload of a finished one.
- `fold`: the state of a run from its records, and the state in which its queue begins. Pure.
- `queue_log`: what a queue tells its log; `turns`: the answers to episodes under way; `belonging`: of which run a log is.

docs/log-format.md has the bytes.
"""
