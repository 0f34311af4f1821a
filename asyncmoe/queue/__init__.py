"""The queue between engines and trainer: admission, storage, leases, and counts of trained and dropped trajectories.

`admission` (capacity law and staleness), `start_order` (what starts next) and `group_state` (when a group is complete) are pure.
`group_buffer` stores groups, `bounded` waits (asyncio), `service` implements the protocol of `asyncmoe.rpc.messages`.
"""
