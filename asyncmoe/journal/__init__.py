"""The durable queue: what was sampled, on disk before it counts.

- `segments`: payloads in append-only, checksummed files; `payload`: what is in one.
- `rows`, `states`: what began, ended, was leased and committed, in SQLite.
- `recovery`: the state in which a queue begins, from the rows and the step of the checkpoint. Pure.
- `journal`: the journal of one queue; `belonging`: of which run.

docs/journal-format.md has the bytes and the tables.
"""
