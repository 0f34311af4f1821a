"""The queue between engines and trainer: admission, storage, leases, and counts of trained and dropped trajectories.

Pure: `admission` (capacity law and staleness), `leases` (which step holds which answer), `accounts` (counts and their reasons),
`start_order` (what starts next) and `group_state` (when a group is complete). `group_buffer` stores groups, `bounded` waits (asyncio),
`service` implements the protocol of `asyncmoe.rpc.messages`.
"""
