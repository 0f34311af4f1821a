"""The adapter as whole tensors: gathered from all ranks, and put into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import DataError
from asyncmoe.models.parallel import MegatronParallel
from asyncmoe.models.shape import Shape
from asyncmoe.reshard import Bucket, LocalTransport, buckets, exchange, plan_each
from asyncmoe.reshard import plan as plan_of
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.trainer.lora import layout
from asyncmoe.trainer.lora.attach import parameters


class AdapterGatherer:
    """Plans once, then gathers the current values as often as asked. As `asyncmoe.trainer.gather.Gatherer` does for the weights.

    Args:
        chunks: this rank's model chunks; all ranks make a gatherer of theirs.
        bucket_bytes: upper bound of a bucket; one larger half gets a bucket of its own.
        timeout_s: how long a rank waits for another.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        m: Shape,
        section: LoraSection,
        parallel: MegatronParallel,
        rank: int,
        *,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._mine = {name: parameter.data for name, parameter in parameters(chunks).items()}
        first = next(iter(self._mine.values()))
        self._dtype, self._device, self._rank, self._timeout_s = first.dtype, first.device, rank, timeout_s
        self._transport = TorchTransport(device=str(self._device))
        dtype = str(self._dtype).removeprefix("torch.")
        self.buckets: list[Bucket] = buckets(layout.canonical_layout(m, section, dtype), bucket_bytes)
        ranks = layout.rank_layouts(m, section, parallel, dtype)
        self._plans = plan_each(layout.tensors(m, section), ranks, [[bucket.layout] for bucket in self.buckets], ranks=[rank])

    def run(self) -> Iterator[tuple[Bucket, torch.Tensor | None]]:
        """Collective over all trainer ranks: each bucket with its flat tensor (on rank 0; None elsewhere), in a fixed order."""
        for bucket, plan in zip(self.buckets, self._plans, strict=True):
            flat = None
            if self._rank == 0:
                flat = torch.empty(bucket.layout.storages["bucket"].shape, dtype=self._dtype, device=self._device)
            exchange(plan, self._transport, self._mine, None if flat is None else {"bucket": flat}, timeout_s=self._timeout_s)
            yield bucket, flat


def write(
    chunks: Sequence[torch.nn.Module],
    m: Shape,
    section: LoraSection,
    parallel: MegatronParallel,
    rank: int,
    halves: Mapping[str, torch.Tensor],
) -> None:
    """Fill this rank's halves from whole ones, as `local` cuts them. Call it before the optimizer is built: with bfloat16 that copies them
    into float32 masters.

    Raises:
        DataError: see `local`.
    """
    mine = parameters(chunks)
    dtype = next(iter(mine.values())).dtype
    for name, value in local(m, section, parallel, rank, halves, dtype).items():
        mine[name].data.copy_(value)


def local(
    m: Shape, section: LoraSection, parallel: MegatronParallel, rank: int, halves: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A rank's part of whole halves, by the names of its parameters; on the host.

    Args:
        halves: by canonical name, on the host; of any floating-point dtype.

    Raises:
        DataError: a half is missing, is not of this adapter, or has another shape.
    """
    wanted, name = layout.tensors(m, section), str(dtype).removeprefix("torch.")
    refuse_another(wanted, {half: tuple(value.shape) for half, value in halves.items()})
    here = layout.rank_layout(m, section, parallel, rank, name).at(0)
    steps = plan_of(wanted, [layout.canonical_layout(m, section, name)], [here])
    arrays = {source: halves[source].detach().to(dtype).contiguous() for source in steps.sources.get(0, {})}
    made = {target: torch.empty(storage.shape, dtype=dtype) for target, storage in here.storages.items()}
    exchange(steps, LocalTransport(), arrays, made)
    return made


def refuse_another(wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse the halves of another adapter, or of another model's.

    Raises:
        DataError: the first that differs.
    """
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            got = "nothing" if name not in given else f"shape {list(given[name])}"
            expected = "nothing: no target, or not of this model" if name not in wanted else f"shape {list(wanted[name])}"
            raise DataError(
                f"adapter: {name}", got=got, expected=expected, cure="make lora.rank, lora.targets and lora.experts those of the adapter"
            )
