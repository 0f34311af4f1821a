"""What a model takes of the memory of a rank, from layouts alone: weights and what belongs to them, not activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncmoe.models import MegatronParallel
from asyncmoe.reshard.layout import ITEM_BYTES, RankLayout, Storage

_GRADIENT, _MOMENTS, _MASTER = 4, 8, 4
"""Bytes an entry: a float32 gradient, Adam's two moments in float32, and the float32 copy of a weight of another dtype."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the trainer's rank that has the most.

    Attributes:
        weights: in the trainer's dtype.
        gradients: all of them, in float32.
        optimizer: Adam's state, and float32 copies of weights that are in another dtype; the same on all data-parallel ranks.
        optimizer_distributed: the same where data-parallel ranks share it out (`trainer.optimizer.distributed`).
    """

    weights: int
    gradients: int
    optimizer: int
    optimizer_distributed: int


def trainer_memory(layouts: Iterable[RankLayout], parallel: MegatronParallel) -> TrainerMemory:
    """Of a trainer whose ranks hold these layouts.

    Raises:
        ValueError: there are none.
    """
    expert_dp = parallel.tp * parallel.dp // (parallel.ep * parallel.etp)
    ranks = []
    for storages in _distinct(layouts):
        of_experts = [one for name, one in storages.items() if ".mlp.experts." in name]
        others = [one for name, one in storages.items() if ".mlp.experts." not in name]
        state = [sum(one.size * _state(one) for one in part) for part in (others, of_experts)]
        shared = -(-state[0] // parallel.dp) + -(-state[1] // expert_dp)
        weights = sum(one.nbytes for one in storages.values())
        ranks.append(TrainerMemory(weights, _GRADIENT * sum(one.size for one in storages.values()), sum(state), shared))
    return max(ranks, key=lambda rank: rank.weights + rank.gradients + rank.optimizer)


def engine_weights(layouts: Iterable[RankLayout]) -> int:
    """Bytes of the engine's rank that has the most. Staging memory is as much again."""
    return max(sum(one.nbytes for one in storages.values()) for storages in _distinct(layouts))


def _state(storage: Storage) -> int:
    return _MOMENTS + (_MASTER if ITEM_BYTES[storage.dtype] < ITEM_BYTES["float32"] else 0)


def _distinct(layouts: Iterable[RankLayout]) -> Sequence[dict[str, Storage]]:
    """The storages of ranks that hold different ones; those made by `RankLayout.at` of one are one."""
    found = {id(layout.storages): layout.storages for layout in layouts}
    return [dict(storages) for storages in found.values()]
