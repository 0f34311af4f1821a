"""The queue between engines and trainer: admission, storage, leases, and counts of trained and dropped trajectories.

Pure: `admission` (capacity law and staleness), `leases` (the answers to each step's lease) and `accounts` (counts and their reasons).
`group_buffer` stores groups, `bounded` waits (asyncio), `service` implements the protocol of
`asyncmoe.rpc.messages`.
"""
