"""The durable queue: what was sampled, on disk before it counts.

`segments` keeps payloads in append-only, checksummed files. docs/journal-format.md has their bytes.
"""
