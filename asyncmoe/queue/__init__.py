"""Between engines and trainer: who may start, what waits, what is leased, what was trained or dropped.

`admission` decides (pure), `lane` holds, `bounded` waits (asyncio), `service` speaks the protocol of `asyncmoe.wire.messages`.
"""
