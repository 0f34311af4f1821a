"""Sparse deltas of one rank's weights on a CPU: bytes, and speed of encoding, applying and digesting, compared with plain copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.models import family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.reshard import DeltaDecoder, DeltaEncoder, Plan, plan
from asyncmoe.reshard.programs import local_program
from benchmarks import reshard
from benchmarks.copies import plain_copies
from benchmarks.memory import Growth
from benchmarks.provenance import here

PERCENTS = (0.3, 1.0, 3.0)
ROUNDS = 5
MODEL: dict[str, Any] = {**reshard.MODEL, "num_hidden_layers": 2}
"""Qwen3-30B-A3B's widths, two layers of 24 experts: half of it, the shard of one of two engine ranks, is 0.3 GB in bfloat16."""


def run(hf: dict[str, Any] | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure bfloat16 deltas from a trainer rank with all weights to one of two engine ranks, with a share of elements changed at random.

    Returns:
        {"date", "machine", "load", "rounds", "threads", "dense_bytes", "memcpy", "digest", "full", "percents"}. Rates are GB/s of dense
        bytes, medians over alternating turns: "memcpy" is libc's, of the destination's arrays into one buffer; "digest" computes the
        canonical digest of the destination, "full" packs everything into the sender's base and digests it. An entry of "percents"
        has "percent", "changed" (elements), "nbytes" (of all messages), "bytes_per_change", "encode" (GB/s of compared dense bytes),
        "encode_share" (of memcpy, median per turn; includes advancing the sender's base), "take", "prove"
        and "commit" (millions of changed elements per second: messages kept; terms compared with the old bits in memory; written), and
        "peak_extra_bytes", the largest rise of both sides' memory together, in this one process.

    Raises:
        InvariantBroken: a delta yielded wrong weights.
    """
    measured_at = here()
    case = _Case(hf or MODEL)
    turns: dict[str, list[float]] = {"memcpy": [], "digest": [], "full": []}
    found: dict[float, list[dict[str, float]]] = {percent: [] for percent in PERCENTS}
    for number in range(rounds + 1):
        memcpy = case.rate(case.copy)
        digest, full = case.rate(case.adopt), case.rate(case.fill)
        case.adopt()
        measured = [case.update(percent, number) for percent in PERCENTS]
        if number == 0:
            continue
        for name, rate in (("memcpy", memcpy), ("digest", digest), ("full", full)):
            turns[name].append(rate)
        for percent, one in zip(PERCENTS, measured, strict=True):
            found[percent].append({**one, "encode_share": one["encode"] / memcpy})
    case.check()
    return {
        **measured_at,
        "rounds": rounds,
        "threads": case.threads,
        "dense_bytes": case.sender.base_bytes,
        **{name: median(rates) for name, rates in turns.items()},
        "percents": [{"percent": percent, **{key: median(one[key] for one in all_) for key in all_[0]}} for percent, all_ in found.items()],
    }


class _Case:
    """One sender, one receiver, and their arrays."""

    def __init__(self, hf: dict[str, Any]) -> None:
        family = family_of(hf)
        shapes, source = family.tensors(hf), family.megatron_layout(hf, MegatronParallel(), 0, "bfloat16")
        destination = family.sglang_layout(hf, EngineParallel(tp=2), 0, "bfloat16").at(1)
        made = plan(shapes, [source], [destination])
        self.threads = min(4, os.cpu_count() or 1)
        self.source = {name: np.ones(storage.size, np.uint16) for name, storage in source.storages.items()}
        self.held = {name: np.zeros(storage.size, np.uint16) for name, storage in destination.storages.items()}
        self.sender = DeltaEncoder(made, 0, threads=self.threads)
        self.receiver = DeltaDecoder(made, 1, threads=self.threads)
        self.sender.bind(self.source)
        self.receiver.bind(self.held)
        self.version = 0
        self._plan = made
        self.fill()
        _dense(self._plan, self.source, self.held)
        self.adopt()
        _, self.copy = plain_copies(list(self.held.values()), self.threads, out=True)

    def fill(self) -> None:
        """Run the sender's part of a full update."""
        self.version += 1
        self.sender.full(self.version)

    def adopt(self) -> None:
        self.receiver.adopt(self.version, {0: self.sender.digest(1)})

    def rate(self, turn: Callable[[], object]) -> float:
        """GB/s of dense bytes."""
        return self.sender.base_bytes / _seconds(turn) / 1e9

    def update(self, percent: float, seed: int) -> dict[str, float]:
        """Change a share of the source's elements and transfer them."""
        generator = np.random.default_rng(seed)
        for array in self.source.values():
            places = generator.integers(0, array.size, round(percent / 100 * array.size))
            array[places] ^= generator.integers(1, 128, len(places)).astype(np.uint16)
        self.version += 1
        growth, started = Growth(), time.perf_counter()
        size = self.sender.encode(self.version, limit_bytes=1 << 40)
        encoding = time.perf_counter() - started
        if size is None:
            raise InvariantBroken("a delta without a limit was not encoded")
        messages = [np.empty(nbytes, np.uint8) for nbytes in self.sender.sizes(1)]
        for number, message in enumerate(messages):
            self.sender.put(1, number, int(message.ctypes.data))
        turns: dict[str, Callable[[], object]] = {
            "take": lambda: self._take(messages),
            "prove": lambda: self.receiver.prove({0: self.sender.digest(1)}),
            "commit": lambda: self.receiver.commit(self.version),
        }
        rates = {name: size.changed / _seconds(turn) / 1e6 for name, turn in turns.items()}
        return {
            "changed": size.changed,
            "nbytes": size.nbytes,
            "bytes_per_change": size.nbytes / size.changed,
            "encode": self.sender.base_bytes / encoding / 1e9,
            **rates,
            "peak_extra_bytes": growth.peak_bytes(),
        }

    def _take(self, messages: list[np.ndarray]) -> None:
        self.receiver.expect({0: [len(message) for message in messages]})
        for number, message in enumerate(messages):
            self.receiver.take(0, number, int(message.ctypes.data))

    def check(self) -> None:
        """Check that the destination equals the result of a dense update."""
        had = {name: array.copy() for name, array in self.held.items()}
        _dense(self._plan, self.source, self.held)
        if any((array != had[name]).any() for name, array in self.held.items()):
            raise InvariantBroken("deltas yielded other weights than a dense update of the same sources")


def _dense(made: Plan, source: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray]) -> None:
    """Copy everything, as a dense update does."""
    program = local_program([t.copies for t in made.transfers])
    if program is not None:
        read, written = (
            np.array([arrays[name].ctypes.data for name in names], np.int64)
            for arrays, names in ((source, made.sources[0]), (held, made.destinations[1]))
        )
        program.run(0, read, written)


def _seconds(turn: Callable[[], object]) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started


def table(results: dict[str, Any]) -> str:
    """Format the results as lines of text."""
    lines = [
        f"dense: {results['dense_bytes'] / 1e6:.0f} MB of bfloat16, {results['threads']} threads",
        f"memcpy {results['memcpy']:.1f} GB/s   digest of the destination {results['digest']:.1f} GB/s   full {results['full']:.1f} GB/s",
        " changed  B/change  of dense       encode  of memcpy     take    prove   commit  memory of both",
    ]
    for one in results["percents"]:
        lines.append(
            f"{one['percent']:7.1f}% {one['bytes_per_change']:9.3f} {one['nbytes'] / results['dense_bytes']:8.2%} "
            f"{one['encode']:7.1f} GB/s {one['encode_share']:10.2f} "
            + " ".join(f"{one[name]:6.1f} M" for name in ("take", "prove", "commit"))
            + f"{one['peak_extra_bytes'] / results['dense_bytes']:15.2%}"
        )
    return "\n".join([*lines, "take, prove, commit: millions of changed elements a second"])
