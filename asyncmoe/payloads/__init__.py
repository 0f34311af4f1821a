"""A site's distributed store in place of our own memory, for the trajectories of finished groups (queue.payloads).

A store holds bytes only. The controller's queue decides, as without one, what is leased, trained and dropped; what a store loses is read
from the journal.

- `store`: what a store does. `opening`: connects to the one that a run has. `writer`: puts groups into it.
- `packed`: the pieces of a trajectory in a store, each with a checksum.
- `in_redis`, `redis_reading`, `redis_scripts`: Redis. `in_ray`: Ray. `in_mooncake`, `mooncake_client`, `mooncake_layout`: Mooncake.
"""
