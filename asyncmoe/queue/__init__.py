"""Between engines and trainer: who may start, what waits, what is leased, what was trained or dropped.

`admission` decides who may start and who is too old, `start_order` what starts next, `group_state` when a group is whole: all pure.
`group_buffer` holds, `bounded` waits (asyncio), `service` speaks the protocol of `asyncmoe.rpc.messages`.
"""
