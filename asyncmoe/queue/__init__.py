"""The queue between engines and trainer: admission, storage, leases, and counts of trained and dropped trajectories.

Pure: `admission` (capacity law and staleness), `leases` (which step holds which answer), `accounts` (counts and their reasons)
and `start_order` (what starts next). `group_buffer` stores groups, `bounded` waits (asyncio), `service` implements the protocol of
`asyncmoe.rpc.messages`.
"""
