"""What is moved between which hosts, and the least time that the links allow for it. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken, UserError
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import Plan, RankLayout, plan
from benchmarks.network.hosts import Wire
from benchmarks.published import REAL

DTYPE = "bfloat16"
HEADERS = 66
"""Bytes of a full segment that are not data: Ethernet 14, IPv4 20, TCP with time stamps 32 (RFC 7323)."""
_LAYERS = 2
_WIDTHS: dict[str, Any] = {
    **REAL["Qwen3-30B-A3B"], "hidden_size": 1024, "num_attention_heads": 16, "moe_intermediate_size": 384, "intermediate_size": 3072,
    "num_hidden_layers": _LAYERS, "vocab_size": 8192,
}  # fmt: skip
"""Half of Qwen3-30B-A3B's widths."""
_SMALL_VOCABULARY = {"vocab_size": 2560}
_SMALL_MB = 55.0
"""Below, the vocabulary is small."""


@dataclass(frozen=True)
class Case:
    """A model from trainer hosts to engine hosts, with one rank on each; trainers come first.

    Attributes:
        hf: the model's configuration.
        trainers: trainer hosts: tp 2 if there are an even number of them, and experts over half of them.
        engines: equal engines.
        tp: hosts of an engine.
    """

    hf: dict[str, Any]
    trainers: int
    engines: int
    tp: int

    @property
    def name(self) -> str:
        replicas = f"{self.engines}x{self.tp}" if self.engines > 1 else f"{self.tp}"
        return f"{self.trainers}+{replicas}"

    @property
    def world(self) -> int:
        return self.trainers + self.engines * self.tp

    @property
    def trainer(self) -> MegatronParallel:
        tp = 2 - self.trainers % 2
        return MegatronParallel(tp=tp, ep=max(tp, self.trainers // 2), dp=self.trainers // tp)


@dataclass(frozen=True)
class Traffic:
    """Bytes of weights that every host sends and receives.

    Attributes:
        sent, received: by host.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.sent)

    def seconds(self, rate: int) -> float:
        """The bound of the busiest link of `rate` bits a second in each direction: no headers, no waiting."""
        return 8 * max(*self.sent, *self.received) / rate


def parse(text: str) -> tuple[int, int, int]:
    """Return trainer hosts, engines and hosts of an engine: of "4+2", one engine of two hosts; of "2+4x2", four of two.

    Raises:
        UserError: it is neither.
    """
    found = re.fullmatch(r"(\d+)\+(?:(\d+)x)?(\d+)", text.strip())
    numbers = (int(found[1]), int(found[2] or 1), int(found[3])) if found else (0, 0, 0)
    if not min(numbers):
        raise UserError("--hosts", got=text, expected="trainers+engine, as 4+2, or trainers+engines x hosts of each, as 2+4x2")
    return numbers


def sized(megabytes: float, experts_of: int) -> dict[str, Any]:
    """Return a configuration of about as many megabytes in bfloat16, of at least 36, with a multiple of `experts_of` experts."""
    hf = {**_WIDTHS, **(_SMALL_VOCABULARY if megabytes < _SMALL_MB else {}), "num_experts": experts_of}
    one, two = nbytes(hf), nbytes({**hf, "num_experts": 2 * experts_of})
    groups = max(1, round((megabytes * 1e6 - one) / (two - one)) + 1)
    return {**hf, "num_experts": groups * experts_of, "num_experts_per_tok": min(8, groups * experts_of)}


def nbytes(hf: dict[str, Any]) -> int:
    """Bytes of a model in bfloat16."""
    return 2 * sum(int(np.prod(shape)) for shape in family_of(hf).tensors(hf).values())


def case(hosts: str, megabytes: float) -> Case:
    """Return the case of `--hosts` and `--megabytes`."""
    trainers, engines, tp = parse(hosts)
    empty = Case({}, trainers, engines, tp)
    return Case(sized(megabytes, empty.trainer.ep), trainers, engines, tp)


def layouts(case: Case) -> tuple[list[RankLayout], list[RankLayout]]:
    """Trainer ranks, and engine ranks after them."""
    family, engine = family_of(case.hf), EngineParallel(tp=case.tp)
    source = [family.megatron_layout(case.hf, case.trainer, rank, DTYPE) for rank in range(case.trainers)]
    shards = [family.sglang_layout(case.hf, engine, rank, DTYPE) for rank in range(case.tp)]
    firsts = range(case.trainers, case.world, case.tp)
    return source, [shards[rank].at(first + rank) for first in firsts for rank in range(case.tp)]


def planned(case: Case, ranks: Iterable[int] | None = None) -> Plan:
    """Return the plan of `case`, or the part of `ranks`."""
    return plan(family_of(case.hf).tensors(case.hf), *layouts(case), ranks=ranks)


def traffic(made: Plan, world: int) -> Traffic:
    """Return what a plan, or a part of it, moves."""
    sent, received = [0] * world, [0] * world
    for source, destination, count in made.match.traffic().tolist():
        sent[source] += count
        received[destination] += count
    return Traffic(tuple(sent), tuple(received))


def most_on_the_wire(planned_out: int, planned_in: int, segment: int, retransmitted: int) -> int:
    """Return the most bytes that a host's interface should count on the way out: data with headers, an acknowledgement of every segment
    received, what was sent twice, and 0.5 MB for digests, barriers and addresses.

    Args:
        planned_out, planned_in: bytes of weights that it sends and receives.
        segment: data bytes of a full segment.
        retransmitted: segments.
    """
    headers = HEADERS * (-(-planned_out // segment) + -(-planned_in // segment))
    return planned_out + headers + retransmitted * (segment + HEADERS) + 500_000


def check(one: Case, way: str, ranks: Sequence[Mapping[str, Any]], planned: Traffic | None, wire: Wire) -> None:
    """Compare what every host holds and counted in a turn with the trainer's weights and the plan.

    Raises:
        InvariantBroken: a host holds other weights, or its interface counted other bytes.
    """
    wrong = [rank for rank, found in enumerate(ranks) if not found["right"]]
    if wrong:
        raise InvariantBroken(f"{one.name}, {way}: host {wrong[0]} holds other weights than the trainer")
    for rank, found in enumerate(ranks if planned is not None else ()):
        assert planned is not None
        out, into = planned.sent[rank], planned.received[rank]
        segment, again = wire.mtu - 52, sum(other["retransmitted"] for other in ranks)
        for kind, least, back in (("sent", out, into), ("received", into, out)):
            most = most_on_the_wire(least, back, segment, again)
            if not least <= found[kind] <= most:
                said = f"{kind} {found[kind]} bytes by its interface, the plan says {least}, {most} with all that TCP adds"
                raise InvariantBroken(f"{one.name}, {way}: host {rank} {said}")
