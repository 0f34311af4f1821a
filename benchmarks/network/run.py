"""Weights from trainer hosts to engine hosts over links of a set rate: how near a transfer comes to the bound of the busiest link."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

from asyncmoe.errors import TransferError, WaitTimeout
from benchmarks.network.cases import Case, Traffic, case, check, nbytes, planned, traffic
from benchmarks.network.delta_summary import summary
from benchmarks.network.delta_summary import table as delta_table
from benchmarks.network.hosts import Host, Wire, missing, network
from benchmarks.network.rank import DIRECT, Job
from benchmarks.provenance import here
from benchmarks.reshard import BASELINES

HOSTS = ("4+2", "8+4", "2+4x2")
MEGABYTES = 80.0
BUCKET_BYTES = 4 << 20
"""Small, as the shards are: a transfer should take many rounds, as one of a large model in buckets of `sync.bucket_bytes` does."""
_TIMEOUT_S = 600.0
"""For a message or a rank to come."""
_CASE_S = 3600.0
_REPOSITORY = Path(__file__).parents[2]


def run(
    hosts: Sequence[str], megabytes: Sequence[float], wire: Wire, rounds: int, baselines: bool = True, changed: Sequence[float] = ()
) -> dict[str, Any]:
    """Measure every case, or say why none can be.

    Args:
        megabytes: sizes of models; every one goes between all `hosts`.
        changed: percents of the weights that change, for deltas; empty: none are measured.

    Returns:
        {"date", "machine", "load", "skipped"}, "skipped" the reason or empty; and unless skipped "wire", "rounds", "bucket_bytes" and
        "cases", each as `measured` returns it.

    Raises:
        UserError: `hosts` has another form.
        InvariantBroken: a destination holds other bytes than it should, or a host's interface counted other bytes than were planned.
        TransferError, WaitTimeout: a rank died, or took too long.
    """
    at, wanted = here(), [case(one, size) for size in megabytes for one in hosts]
    if why := missing():
        return {**at, "skipped": why}
    ways = (DIRECT, *(BASELINES if baselines else ()))
    found = [measured(one, wire, ways, rounds, changed=changed) for one in wanted]
    return {**at, "skipped": "", "wire": asdict(wire), "rounds": rounds, "bucket_bytes": BUCKET_BYTES, "cases": found}


def measured(
    one: Case, wire: Wire, ways: Sequence[str], rounds: int, bucket_bytes: int = BUCKET_BYTES, changed: Sequence[float] = ()
) -> dict[str, Any]:
    """Measure a case; every way has its turn in every round, without turns to warm up.

    Returns:
        {"name", "trainers", "engines", "engine_tp", "bytes" (of the model), "load" (before), "ways"}; each way as `_summary` returns it.
        `DIRECT` must be among the ways. With `changed` also "deltas", as `delta_summary.summary` returns them. `run` has the errors.
    """
    load = os.getloadavg()[0]
    with network(one.world, wire) as made, tempfile.TemporaryDirectory() as folder:
        job = {"case": asdict(one), "first": made[0].address, "ways": ways, "rounds": rounds, "changed": changed}
        limits = {"bucket_bytes": bucket_bytes, "timeout_s": _TIMEOUT_S}
        jobs = [Job(rank=rank, **job, **limits) for rank in range(one.world)]  # type: ignore[arg-type]
        ranks = _ranks(made, jobs, Path(folder))
    direct, found = traffic(planned(one), one.world), {}
    for way in ways:
        turns = [[rank["turns"][way][number] for rank in ranks] for number in range(rounds)]
        found[way] = _summary(one, way, turns, direct, wire)
    head = {"name": one.name, "trainers": one.trainers, "engines": one.engines, "engine_tp": one.tp, "bytes": nbytes(one.hf)}
    deltas = {"deltas": summary(one, [rank["deltas"] for rank in ranks], direct, wire)} if changed else {}
    return {**head, "load": load, "ways": found, **deltas}


def _ranks(hosts: Sequence[Host], jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    """Run one rank on every host; what each printed."""
    with ExitStack() as files:
        started = []
        for host, job in zip(hosts, jobs, strict=True):
            out, log = (files.enter_context((folder / f"{job.rank}.{end}").open("wb")) for end in ("json", "log"))
            command = [sys.executable, "-m", "benchmarks.network.rank", json.dumps(asdict(job))]
            paths = os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
            started.append(host.start(command, {"PYTHONPATH": paths}, out, log))
        _wait(started, folder)
    return [json.loads((folder / f"{job.rank}.json").read_text().splitlines()[-1]) for job in jobs]


def _wait(started: Sequence[Popen[bytes]], folder: Path) -> None:
    until = time.monotonic() + _CASE_S
    while True:
        statuses = [one.poll() for one in started]
        if wrong := [rank for rank, status in enumerate(statuses) if status]:
            said = (folder / f"{wrong[0]}.log").read_text(errors="replace").strip().splitlines()
            raise TransferError(wrong[0], wrong[0], f"its process ended with status {statuses[wrong[0]]}: {said[-1] if said else ''}")
        if None not in statuses:
            return
        if time.monotonic() > until:
            raise WaitTimeout("the ranks of the measurement", "their results", _CASE_S)
        time.sleep(0.05)


def _summary(one: Case, way: str, turns: Sequence[Sequence[Mapping[str, Any]]], direct: Traffic, wire: Wire) -> dict[str, Any]:
    """Put together what the ranks measured of a way.

    Args:
        turns: of every round, what every rank measured.
        direct: bytes of weights that a transfer from shard to shard moves.

    Returns:
        "seconds" {"best", "median", "all"}, from barrier to barrier; "share" {"best", "median"}, the bound of a transfer from shard to
        shard divided by them; "bytes" that all hosts sent by their interfaces, in the median; "trainer_copies": bytes that left the
        trainers' interfaces, divided by the model's, of all together; "busiest_nic_copies": of the one that sent most; "retransmitted"
        segments; "cpu_share": CPU seconds of all ranks, of the machine's cores; and of `DIRECT` "planned_bytes", "bound_s", "over_plan":
        bytes on the wire divided by planned ones, of the host where that is most; "phases", of the slowest rank, as `Moved.seconds`.

    Raises:
        InvariantBroken: see `run`.
    """
    seconds = [max(rank["seconds"] for rank in ranks) for ranks in turns]
    cores = os.cpu_count() or 1
    middle = turns[seconds.index(sorted(seconds)[len(seconds) // 2])]
    for ranks in turns:
        check(one, way, ranks, direct if way == DIRECT else None, wire)
    least, sent = direct.seconds(wire.rate), [rank["sent"] for rank in middle]
    found = {
        "seconds": {"best": min(seconds), "median": median(seconds), "all": seconds},
        "share": {"best": least / min(seconds), "median": least / median(seconds)},
        "bytes": sum(sent),
        "trainer_copies": sum(sent[: one.trainers]) / nbytes(one.hf),
        "busiest_nic_copies": max(sent[: one.trainers]) / nbytes(one.hf),
        "retransmitted": sum(rank["retransmitted"] for rank in middle),
        "cpu_share": sum(rank["cpu_s"] for rank in middle) / max(rank["seconds"] for rank in middle) / cores,
    }
    if way != DIRECT:
        return found
    over = [rank[kind] / count for kind, counts in asdict(direct).items() for rank, count in zip(middle, counts, strict=True) if count]
    phases = {name: max(rank["phases"][name] for rank in middle) for name in middle[0]["phases"]}
    return {**found, "planned_bytes": direct.total, "bound_s": least, "over_plan": max(over), "phases": phases}


def table(results: Mapping[str, Any]) -> str:
    """The figures in lines."""
    if results["skipped"]:
        return f"skipped: {results['skipped']}"
    lines = [f"{'hosts':9} {'way':30} {'best s':>8} {'median s':>9} {'of bound':>9} {'trainers sent':>14} {'CPU':>5}"]
    for one in results["cases"]:
        for way, found in one["ways"].items():
            times, share = found["seconds"], found["share"]["median"]
            figures = f"{times['best']:8.2f} {times['median']:9.2f} {share:9.1%} {found['trainer_copies']:7.2f} copies"
            lines.append(f"{one['name']:9} {way:30} {figures} {found['cpu_share']:5.0%}")
    return "\n".join([*lines, *delta_table(results)])
