"""A whole run in which a trainer and a real SGLang server use one card in turn: `python -m tests.gpu.bundle.colocated RESULT`.

Every step samples, puts the engine to sleep, trains, and sends its weights to the engine, in bfloat16 through CUDA IPC; every version's
checksums and log-probabilities are compared. The controller's log says when each state (`asyncmoe.occupancy`) began, and a thread reads how
many bytes of the card are in use, whoever uses them. Without a card the run is smaller, in float32 through shared memory, and the bytes are
those of the whole machine's memory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncmoe.config import Config, parse
from asyncmoe.models import load_hf_config
from asyncmoe.models.make import make_model
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import budget
from asyncmoe.telemetry import run as records
from asyncmoe.telemetry.summary import write_summary
from tests.gpu.bundle import processes
from tests.gpu.bundle.summary import write_outcome

CARD = torch.cuda.is_available()
SWITCHES = 20 if CARD else 4
"""From the engine to the trainer and back; the run's end is one step later, with the trainer."""
CLOSE = 0.3 if CARD else 1e-3
"""Largest difference in nats of a log-probability between engine and trainer."""
CYCLE = (DeviceTurn.GENERATING, DeviceTurn.DRAINING, DeviceTurn.ASLEEP, DeviceTurn.TRAINING, DeviceTurn.WAKING)
GIVEN_BACK = 0.95
"""Share of the planned bytes of weights and KV cache that must become free while the engine sleeps."""
GROWING = ("generating", "asleep", "training")
GROWN = 8 << 20
"""Bytes of a switch that may be in use after the next one too."""
SETTLED = 2
"""Switches after which growth counts: the first ones load kernels."""
_SAMPLE_S, _POLL_S = 0.002 if CARD else 0.01, 0.1
Sample = tuple[float, int]
"""Unix seconds, and the bytes then in use."""
Figures = dict[str, tuple[Any, str]]


class Stay(NamedTuple):
    """How long a state lasted, in Unix seconds, and the least and most bytes in use meanwhile."""

    turn: DeviceTurn
    begin: float
    end: float
    least: int
    most: int


def main() -> None:
    end = time.monotonic() + float(os.environ.get("ASYNCMOE_BUNDLE_SECONDS", "300")) - 2 * processes.GRACE_S
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        config = parse(configuration(Path(folder)))
        assert config.model.make is not None
        make_model(config.model.path, config.model.make, seed=0)
        used()  # it makes this process's own context
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(samples, used(), stop))
        watcher.start()
        run = processes.Run(config)
        while run.going() and time.monotonic() < end:
            time.sleep(_POLL_S)
        why = run.end()
        stop.set()
        watcher.join()
        if kept := os.environ.get("ASYNCMOE_BUNDLE_LOGS"):
            shutil.copytree(run.logs, Path(kept) / "colocated")
        found = stays((run.logs / "controller.log").read_text(), samples)
        figures: Figures = {"server": ("bare_server" if processes.bare() else "SGLang's own", ""), "dtype": (str(config.trainer.dtype), "")}
        if found:
            figures |= measured(found, *planned(config), records.load(config.run.dir).intervals("train"))
            graphs = (run.logs / "engine-0.log").read_text(errors="replace").count("cuda graph: True")
            figures["graphs"] = (graphs, "decoding steps of captured graphs")
        if not why:
            figures |= told(write_summary(config.run.dir))
    write_outcome(Path(sys.argv[1]), figures)
    if why := f"a colocated run: {why}" if why else wrong(figures):
        sys.exit(why)


def configuration(folder: Path) -> dict[str, Any]:
    """A tiny model on one rank and one engine; on a card, one whose weights and KV cache can be seen there."""
    made = {"layers": 2, "hidden": 64, "experts": 8, "expert_hidden": 64}
    if CARD:
        made = {"layers": 8, "hidden": 1024, "experts": 16, "expert_hidden": 512}
    dtype = "bfloat16" if CARD else "float32"
    engines: dict[str, Any] = {"count": 1, "dtype": dtype, "max_running": 16, "max_total_tokens": 1 << (22 if CARD else 16)}
    engines |= {"python": processes.python(folder), "restarts": 0, "args": ["--decode-log-interval", "1"]}
    return {
        "placement": "colocated",
        "run": {"dir": str(folder / "run"), "steps": SWITCHES + 1},
        "model": {"path": str(folder / "model"), "make": made},
        "task": {"kind": "arithmetic", "operations": ["+"], "difficulty": 1},
        "warmup": {"steps": 2, "batch": 16},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_new_tokens": 6},
        "engines": engines,
        "trainer": {"ranks": 1, "dtype": dtype, "checkpoint_every": 0, "optimizer": {"lr": 1e-4}},
        "sync": {"timeout_s": 60, "verify_every": 1},
        "verify": {"max_logprob_diff": CLOSE},
        "telemetry": {"tensorboard": False},
    }


def used() -> int:
    """Bytes in use on the card, or without one, of this machine's memory, files in memory left out."""
    if CARD:
        free, every = torch.cuda.mem_get_info(0)
        return every - free
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(1024 * int(lines[name].split()[0]) for name in ("AnonPages", "Shmem"))


def watch(samples: list[Sample], idle: int, stop: threading.Event) -> None:
    """Append what is used beyond `idle`, until told to stop."""
    while not stop.wait(_SAMPLE_S):
        samples.append((time.time(), used() - idle))


def planned(config: Config) -> tuple[int, int, int]:
    """What `asyncmoe plan` expects: bytes of the engine's weights and KV cache, of the trainer's parameters, of its optimizer's state."""
    found = budget.of_run(config, load_hf_config(config.model.path), cpu=not CARD)
    engine, trainer = found.engine.parts, found.trainer.parts
    return engine["weights"] + engine["KV cache"], trainer["weights"], trainer["optimizer"]


def stays(log: str, samples: Sequence[Sample]) -> list[Stay]:
    """The states that a controller's log names, in order."""
    begins = [(float(at), DeviceTurn(turn)) for at, turn in re.findall(r"^([\d.]+) devices in turn: \w+, so (\w+)$", log, re.M)]
    ends = [*(at for at, _ in begins[1:]), samples[-1][0]]
    found, times = [], [at for at, _ in samples]
    for (begin, turn), end in zip(begins, ends, strict=False):
        at = bisect(times, begin)
        here = [nbytes for _, nbytes in samples[at : bisect(times, end)] or samples[max(0, at - 1) :][:1]]  # else of just before it
        found.append(Stay(turn, begin, end, min(here), max(here)))
    return found


def measured(found: Sequence[Stay], engine: int, parameters: int, state: int, trains: Sequence[tuple[float, float]]) -> Figures:
    """What each state took.

    Args:
        engine, parameters, state: bytes that are planned.
        trains: when the trainer computed.
    """
    first = next((at for at, stay in enumerate(found) if stay.turn is DeviceTurn.GENERATING), len(found))
    rows = [found[at : at + len(CYCLE)] for at in range(first, len(found) - len(CYCLE), len(CYCLE))]
    figures: Figures = {"switches": (len(rows), "switches to the trainer and back")}
    if len(rows) < SETTLED + 2:
        return figures
    by_turn = {turn: [row[at] for row in rows] for at, turn in enumerate(CYCLE)}
    training = by_turn[DeviceTurn.TRAINING]
    most = {turn.value: [stay.most for stay in by_turn[turn]] for turn in CYCLE}
    # Engines have released all just before the trainer, which then takes its memory, has its turn.
    most["asleep"] = [min(sleeping.least, then.least) for sleeping, then in zip(by_turn[DeviceTurn.ASLEEP], training, strict=True)]
    for name in ("generating", "asleep", "training", "waking"):
        figures[f"{name}_used"] = (median(most[name]), "bytes")
    for turn, of_turn in by_turn.items():
        figures[turn.value] = (median(stay.end - stay.begin for stay in of_turn), "s")
    at_first = next(stay.least for stay in found if stay.turn is DeviceTurn.ASLEEP)
    figures["asleep_first_used"] = (at_first, "bytes, while the trainer had no model yet")
    freed = median(before - after for before, after in zip(most["generating"], most["asleep"], strict=True))
    figures["given_back"] = (freed / engine, "of the engine's weights and KV cache by asyncmoe plan")
    for name in GROWING:
        settled = most[name][SETTLED:]
        figures[f"{name}_growth"] = (float(np.polyfit(range(len(settled)), settled, 1)[0]), "bytes a switch")
    ins = [begin - stay.begin for stay in training for begin, _ in trains if stay.begin < begin < stay.end]
    outs = [stay.end - end for stay in training for _, end in trains if stay.begin < end < stay.end]
    for name, seconds, nbytes in (("load", median(ins), parameters + state), ("unload", median(outs), state)):
        figures |= {name: (seconds, "s"), f"{name}_rate": (nbytes / seconds / 1e9, "GB/s; PCIe 5.0 x16 has 64")}
    return figures


def told(summary: Mapping[str, Any]) -> Figures:
    """What the run says of itself."""
    return {
        "versions": (summary["same_version_versions"], "versions, each compared"),
        "logprob_difference": (summary["max_abs_logprob_diff_same_version"], "nats, largest at the same version"),
        "update": (summary["sync_seconds_median"], "s"),
        "pause": (summary["pause_ms_median"], "ms"),
        "tokens_rate": (summary["tokens_per_s"], "tokens/s"),
    }


def wrong(figures: Figures) -> str:
    """What is not as it must be, in a line, or nothing. Without a card, others use the machine's memory too."""
    value = {name: figure for name, (figure, _) in figures.items()}
    if (got := (value["switches"], value["versions"])) != (expected := (SWITCHES, SWITCHES + 1)):
        return f"switches and versions compared: got {got}, expected {expected}"
    if CARD and value["given_back"] < GIVEN_BACK:
        return f"memory of a sleeping engine: got {value['given_back']:.1%} of weights and KV cache back, expected {GIVEN_BACK:.0%}"
    grown = max(value[f"{name}_growth"] for name in GROWING)
    if CARD and grown > GROWN:
        return f"memory: got {grown:.0f} bytes more in use after each switch, expected at most {GROWN}"
    if CARD and not value["graphs"]:
        return "decoding: got no step of a captured graph, expected some"
    return ""


if __name__ == "__main__":
    main()
