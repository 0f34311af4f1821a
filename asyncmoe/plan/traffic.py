"""Forecast the traffic of a weight update from a trainer to its engines, from configurations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.payload import Payload
from asyncmoe.reshard.match import Match, Sources
from asyncmoe.reshard.table import enumerate_tensors, tabulate


@dataclass(frozen=True)
class Forecast:
    """A full update of all engines, in bytes and seconds.

    Attributes:
        model_bytes: size of the checkpoint or the adapter.
        wire: bytes sent between all ranks.
        sent, received: bytes of the trainer rank that sends the most, and of the engine rank that receives the most.
        within: most bytes that an engine rank receives from the trainer rank on its own device; the figures above leave them out.
        seconds: transfer time of the busiest rank's bytes. Excludes packing, unpacking and any shortfall of the network.
    """

    model_bytes: int
    wire: int
    sent: int
    received: int
    seconds: float
    within: int = 0


def foresee(
    hf: Mapping[str, Any],
    trainer: MegatronParallel,
    engine: EngineParallel,
    engines: int,
    *,
    dtype: str = "bfloat16",
    adapter: Kind | None = None,
    nic: float = 50.0,
    first: int | None = None,
) -> Forecast:
    """Forecast an update by `sync.method: reshard`, for sizes that suit the model.

    Args:
        hf: the model's Hugging Face configuration.
        dtype: dtype of the moved tensors, as torch prints it without the prefix.
        adapter: move an adapter of this kind in place of the weights.
        nic: GB (1e9 bytes) per second that a rank sends while it receives at the same rate.
        first: device of the first engine rank, where devices are used in turn; trainer ranks begin at device 0.
    """
    payload = Payload(hf, adapter)
    numbered = enumerate_tensors(payload.tensors())
    source, destination = payload.trainer(trainer, dtype), payload.engines(engine, dtype, engines, first=trainer.world)
    match = Match(Sources(numbered, tabulate(numbered, source)), tabulate(numbered, destination))
    senders, receivers, nbytes = match.traffic().T
    within = np.zeros(len(nbytes), bool) if first is None else senders == receivers - trainer.world + first
    sent, received, kept = np.zeros((3, trainer.world + engines * engine.world), np.int64)
    np.add.at(sent, senders[~within], nbytes[~within])
    np.add.at(received, receivers[~within], nbytes[~within])
    kept[receivers[within]] = nbytes[within]
    most, seconds = [int(one.max()) for one in (sent, received, kept)], max(sent.max(), received.max()) / 1e9 / nic
    return Forecast(payload.nbytes(dtype), int(sent.sum()), most[0], most[1], float(seconds), most[2])
