"""The path of a weight version from the optimizer step to the engines' parameters.

`sender/` runs in the trainer's ranks, `receiver/` inside every SGLang worker, `coordinator/` in the controller, which pauses the engines
and keeps the ledger of which engine serves which version. `protocol.py` defines the messages between trainer and engine ranks; the ranks'
requests to the controller are in `asyncmoe.rpc.messages`. A version takes one of three ways: shard to shard (`sender/reshard.py`), by
broadcast (`sender/broadcast.py`), or through a directory (`sender/disk.py`). `sender/__init__.py` lists the steps in order.
"""
