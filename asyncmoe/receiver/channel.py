"""How weights travel between the ranks that have met."""

from __future__ import annotations

from asyncmoe.receiver.meeting import Store, Terms
from asyncmoe.reshard import Exchanger, Plan
from asyncmoe.reshard.shm_transport import ShmTransport
from asyncmoe.reshard.torch_transport import TorchTransport


def connect(store: Store, terms: Terms, plan: Plan, epoch: int, threads: int) -> Exchanger:
    """This rank's end of channel `epoch`; returns when the others' are there. A channel in which anything failed is not used again.

    Raises:
        WaitTimeout: the others did not come in time.
        WeightSyncError: one that had come is gone, or there is no memory for the messages.
    """
    if terms.transport == "shm":
        transport: ShmTransport | TorchTransport = ShmTransport(store.rank, f"{terms.session}-{epoch}")
    else:
        transport = TorchTransport(store.connect(terms.world, epoch, terms.timeout_s))
    return Exchanger(plan, transport, bucket_bytes=terms.bucket_bytes, timeout_s=terms.timeout_s, threads=threads)
