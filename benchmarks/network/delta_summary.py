"""What the ranks measured of deltas, put together and compared with full updates. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from asyncmoe.errors import InvariantBroken
from benchmarks.network.cases import Case, Traffic, check, layouts
from benchmarks.network.hosts import Wire

Turn = Mapping[str, Any]
Turns = Sequence[Sequence[Turn]]
"""Of every pair, what every rank measured."""


def summary(one: Case, ranks: Sequence[Mapping[str, Any]], dense: Traffic, wire: Wire) -> dict[str, Any]:
    """Put together what `DeltaRank.run` of every rank returned.

    Args:
        dense: the traffic of a full update.

    Returns:
        "full", of the full update from which deltas start: "seconds", with the trainers' copy of what they published and the engines'
        digest; "peak_extra_bytes", by which the memory of an engine host's process rose at most above what it held before, and
        "peak_extra_share" of its shard, of the host where that is most; "trainer_extra_bytes" and "trainer_extra_share" of a trainer host.
        "percents", each with "percent"; "changed", the share of all elements; "dense" and "delta", as `_way` returns them, the full update
        as of a run without deltas; and "ratio", of "bytes" on the wire and of "seconds", dense divided by delta: medians of the pairs.

    Raises:
        InvariantBroken: a host's weights are not what they should be, or its interface counted other bytes than were planned.
    """
    wrong = [rank for rank, found in enumerate(ranks) if not found["right"]]
    if wrong:
        raise InvariantBroken(f"{one.name}: host {wrong[0]} holds other weights after its deltas than the trainer")
    extra = [rank["full"]["peak_extra_bytes"] for rank in ranks]
    memory = _memory(one, extra, "peak_extra", engines=True) | _memory(one, extra, "trainer_extra", engines=False)
    full = {"seconds": _seconds([rank["full"] for rank in ranks]), **memory}
    return {"full": full, "percents": [_percent(one, name, ranks, dense, wire) for name in ranks[0]["pairs"]]}


def _percent(one: Case, name: str, ranks: Sequence[Mapping[str, Any]], dense: Traffic, wire: Wire) -> dict[str, Any]:
    pairs = range(len(ranks[0]["pairs"][name]))
    turns = {way: [[rank["pairs"][name][pair][way] for rank in ranks] for pair in pairs] for way in ("dense", "delta")}
    coded = [coded_traffic(one, turn) for turn in turns["delta"]]
    for pair in pairs:
        check(one, f"{name} % changed, in full", turns["dense"][pair], dense, wire)
        check(one, f"{name} % changed, as a delta", turns["delta"][pair], coded[pair], wire)
    trainers = [rank["phases"] for turn in turns["delta"] for rank in turn[: one.trainers]]
    delta = _way(one, turns["delta"], coded, wire)
    most = [max(turn[rank]["peak_extra_bytes"] for turn in turns["delta"]) for rank in range(one.world)]
    with_base = [rank["full"]["peak_extra_bytes"] + extra for rank, extra in zip(ranks, most, strict=True)]
    memory = _memory(one, most, "peak_extra", engines=True) | _memory(one, with_base, "trainer_extra", engines=False)
    return {
        "percent": float(name),
        "changed": sum(phases["changed"] for phases in trainers) / sum(phases["elements"] for phases in trainers),
        "dense": {**_way(one, turns["dense"], [dense] * len(pairs), wire), "copy_s": _slowest(turns["dense"], "copy_s")},
        "delta": {**delta, **memory},
        "ratio": {"bytes": _ratio(turns, _sent), "seconds": _ratio(turns, _seconds)},
    }


def coded_traffic(one: Case, turn: Sequence[Turn]) -> Traffic:
    """Return the coded bytes that a delta moves, as the trainer ranks offered them."""
    sent, received = [0] * one.world, [0] * one.world
    for rank, found in enumerate(turn[: one.trainers]):
        for destination, nbytes in found["phases"]["coded"].items():
            sent[rank] += nbytes
            received[int(destination)] += nbytes
    return Traffic(tuple(sent), tuple(received))


def _way(one: Case, turns: Turns, planned: Sequence[Traffic], wire: Wire) -> dict[str, Any]:
    """Put together the turns of one way.

    Returns:
        "seconds" {"best", "median", "all"}, from weights that are ready to an update that all engine ranks have proven; "bytes" that all
        hosts sent by their interfaces; "planned_bytes" of weights or of coded messages; "over_plan", the one divided by the other, of the
        host where that is most; "bound_s" of the busiest link for what was planned; "phases", seconds of the slowest rank in each;
        "commit_s" in which an engine stands still, of the slowest; "cpu_share", CPU seconds of all ranks, of the machine's cores. Medians.
    """
    seconds = [_seconds(turn) for turn in turns]
    middle = seconds.index(sorted(seconds)[len(seconds) // 2])
    turn, plan = turns[middle], planned[middle]
    counts = [(rank[kind], due) for kind in ("sent", "received") for rank, due in zip(turn, getattr(plan, kind), strict=True) if due]
    phases: dict[str, float] = {}
    for rank in turn:
        for name, value in rank["phases"].items():
            if isinstance(value, float):
                phases[name] = max(phases.get(name, 0.0), value)
    return {
        "seconds": {"best": min(seconds), "median": median(seconds), "all": seconds},
        "bytes": median(map(_sent, turns)),
        "planned_bytes": median(one.total for one in planned),
        "over_plan": max(counted / due for counted, due in counts),
        "bound_s": plan.seconds(wire.rate),
        "phases": phases,
        "commit_s": _slowest(turns, "commit_s"),
        "cpu_share": sum(rank["cpu_s"] for rank in turn) / seconds[middle] / (os.cpu_count() or 1),
    }


def _memory(one: Case, extra: Sequence[int], name: str, *, engines: bool) -> dict[str, float]:
    """The most of one side's `extra` bytes, by rank, and the share of that host's shard."""
    source, destination = layouts(one)
    side = destination if engines else source
    shards = {layout.rank: sum(storage.nbytes for storage in layout.storages.values()) for layout in side}
    share, nbytes = max((extra[rank] / shard, extra[rank]) for rank, shard in shards.items())
    return {f"{name}_bytes": nbytes, f"{name}_share": share}


def _ratio(turns: Mapping[str, Turns], figure: Callable[[Sequence[Turn]], float]) -> float:
    return median(figure(dense) / figure(delta) for dense, delta in zip(turns["dense"], turns["delta"], strict=True))


def _seconds(turn: Sequence[Turn]) -> float:
    return max(float(rank["seconds"]) for rank in turn)


def _sent(turn: Sequence[Turn]) -> int:
    return sum(int(rank["sent"]) for rank in turn)


def _slowest(turns: Turns, name: str) -> float:
    return median(max(float(rank[name]) for rank in turn if name in rank) for turn in turns)


def table(results: Mapping[str, Any]) -> list[str]:
    """The figures of deltas in lines; none if there are none."""
    heads = f"{'dense s':>8} {'delta s':>8} {'sooner':>7} {'fewer bytes':>12} {'over plan':>10}"
    lines = [f"{'hosts':9} {'model':>8} {'changed':>8} {heads} {'swap/copy/delta ms':>22} {'memory':>7}"]
    for one in results["cases"]:
        for found in one.get("deltas", {}).get("percents", ()):
            dense, delta, ratio = found["dense"], found["delta"], found["ratio"]
            times = f"{dense['seconds']['median']:8.2f} {delta['seconds']['median']:8.3f} {ratio['seconds']:6.1f}x"
            wire = f"{ratio['bytes']:11.1f}x {delta['over_plan'] - 1:10.1%}"
            pauses = "/".join(f"{1e3 * seconds:.1f}" for seconds in (dense["commit_s"], dense["copy_s"], delta["commit_s"]))
            size = f"{one['bytes'] / 1e6:.0f} MB"
            lines.append(f"{one['name']:9} {size:>8} {found['changed']:8.2%} {times} {wire} {pauses:>22} {delta['peak_extra_share']:7.1%}")
    return lines if len(lines) > 1 else []
