"""Between engines and trainer: who may start, what waits, what is leased, what was trained or dropped.

`admission` decides who may start and who is too old, `line` what starts next, `gathering` when a group is whole: all pure.
`lane` holds, `bounded` waits (asyncio), `service` speaks the protocol of `asyncmoe.wire.messages`.
"""
