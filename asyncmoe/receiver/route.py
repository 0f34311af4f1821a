"""The plans of an update: from every trainer rank's parameters to every engine rank's, one bucket after the other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.receiver.meeting import Terms
from asyncmoe.reshard import Plan, RankLayout, plan_each


def engine_layouts(terms: Terms) -> list[RankLayout]:
    """What every engine rank holds, under its rank in the weight group."""
    family = family_of(terms.hf)
    return [
        family.sglang_layout(terms.hf, EngineParallel(engine.tp, engine.ep), tp, terms.dtype).at(engine.first + tp)
        for engine in terms.engines
        for tp in range(engine.tp)
    ]


def route(terms: Terms) -> list[Plan]:
    """Plans to carry out one after the other; together they write every element of every engine rank. The same on every rank.

    Raises:
        LayoutError: the two sides' layouts contradict each other.
    """
    family = family_of(terms.hf)
    fields: dict[str, Any] = terms.trainer
    trainer = MegatronParallel(**fields)
    source = [family.megatron_layout(terms.hf, trainer, rank, terms.dtype) for rank in range(trainer.world)]
    destination = engine_layouts(terms)
    # Within a pipeline stage the ranks share the load of a bucket; another stage may have nothing of it.
    at_once = terms.bucket_bytes * (trainer.world // trainer.pp)
    names = list(_groups(destination, terms.bucket_bytes, at_once))
    return plan_each(family.tensors(terms.hf), source, [[layout.only(group) for layout in destination] for group in names])


def digest(plans: Sequence[Plan]) -> str:
    """Of all plans; ranks that are to carry them out together must have the same."""
    return hashlib.sha256("".join(plan.digest for plan in plans).encode()).hexdigest()


def _groups(layouts: Sequence[RankLayout], each: int, together: int) -> Iterator[list[str]]:
    """Names of storages in order, cut so that a bucket has at most `each` bytes on a rank and `together` on all ranks.

    A storage that is larger gets its own bucket.
    """
    group: list[str] = []
    filled, total = 0, 0
    for name in layouts[0].storages:
        sizes = [layout.storages[name].nbytes for layout in layouts]
        if group and (filled + max(sizes) > each or total + sum(sizes) > together):
            yield group
            group, filled, total = [], 0, 0
        group.append(name)
        filled, total = filled + max(sizes), total + sum(sizes)
    yield group
