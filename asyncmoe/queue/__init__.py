"""The queue between engines and trainer: admission, storage, leases, and counts of trained and dropped trajectories.

Pure: `admission` (capacity law and staleness), `leases` (which step holds which answer) and `accounts` (counts and their reasons).
`group_buffer` stores groups, `bounded` waits (asyncio), `service` implements the protocol of
`asyncmoe.rpc.messages`.
"""
