"""Both sides one after the other on this machine: CPU time of a sample by role, samples a second, seconds to a reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.config.model import MadeModel
from asyncmoe.errors import InvariantBroken, UserError, WaitTimeout
from asyncmoe.models.make import make_model
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tokenizer import Tokenizer
from benchmarks.provenance import here
from benchmarks.small_scale import ours
from benchmarks.small_scale.case import DEMO, LEVEL, SETTLE, SmallCase, Told, figures

ROOT = Path(__file__).parents[2]
TRL = ROOT / ".venv-peers" / "trl"
CASES = (SmallCase("short", 6, 60, 1280), SmallCase("long", 64, 60, 512))
ARMS = ("ours_1", "ours_2", "trl_1", "trl_2")
"""Our trainer with one rank and with two; TRL with one thread and with two."""
_LIMIT_S = 1500.0


def run(cases: Sequence[str] = (), arms: Sequence[str] = (), steps: int | None = None) -> dict[str, Any]:
    """Measure.

    Args:
        cases, arms: names; none: all.
        steps: of each arm; None: as the case says.

    Returns:
        {"date", "machine", "load", "batch", "trl", "cases"}; "trl": its version, or why it is left out. Of a case, by arm: "cpu_ms", CPU
        milliseconds of a sample by role (`ours.ROLES`; all of TRL is one); "samples_per_s"; "tokens", mean of an answer; "reached_step"
        and "reached_s", the first step whose mean reward is at least `LEVEL`, and seconds from the first request to its end, None if there
        is none; "reward" of each step. The first `SETTLE` steps count for neither CPU nor rate. "raw" of our first arm: the same server
        process alone, the same requests from a trivial client; "bare": without log-probabilities and routes. "ours_ms": an arm of ours
        without its engine and what stands by. "trl_best": the arm of TRL that takes less CPU.

    Raises:
        UserError: an unknown name, or too few steps.
        InvariantBroken, WaitTimeout: a part failed, or took too long.
    """
    for name, known in [*((one, [case.name for case in CASES]) for one in cases), *((one, ARMS) for one in arms)]:
        if name not in known:
            raise UserError("bench peers", got=name, expected=f"one of {', '.join(known)}")
    if steps is not None and steps <= SETTLE:
        raise UserError("--steps", got=steps, expected=f"more than the {SETTLE} that do not count")
    measured_at, missing = here(), "" if TRL.is_dir() else f"no {TRL.relative_to(ROOT)}: make bench-trl"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        base = configuration.load(DEMO, [f"run.dir={scratch}/none"])
        make_model(model, base.model.make or MadeModel(), base.run.seed)
        for case in CASES:
            if not cases or case.name in cases:
                sized = case if steps is None else SmallCase(case.name, case.longest, steps, case.raw)
                wanted = [arm for arm in arms or ARMS if not (missing and arm.startswith("trl"))]
                found[case.name] = _case(sized, Path(scratch) / case.name, model, wanted)
    version = missing or _version()
    return {**measured_at, "batch": base.rollout.batch, "level": LEVEL, "settle": SETTLE, "trl": version, "cases": found}


def _case(case: SmallCase, folder: Path, model: Path, arms: Sequence[str]) -> dict[str, Any]:
    folder.mkdir()
    found: dict[str, Any] = {"longest": case.longest, "steps": case.steps}
    raw = next((arm for arm in arms if arm.startswith("ours")), None)
    for arm in arms:
        print(f"{case.name}: {arm}", file=sys.stderr, flush=True)
        size = int(arm[-1])
        if arm.startswith("ours"):
            made = ours.measure(case, folder / arm, model, size, raw=arm == raw)
            made["ours_ms"] = round(sum(made["cpu_ms"][one] for one in ("controller", "trainer", "launcher")), 3)
        else:
            made = _trl(case, folder, model, size)
        found[arm] = made
    if trl := [arm for arm in arms if arm.startswith("trl")]:
        found["trl_best"] = min(trl, key=lambda arm: found[arm]["cpu_ms"]["trl"])
    return found


def _trl(case: SmallCase, folder: Path, model: Path, threads: int) -> dict[str, Any]:
    config = configuration.load(DEMO, [f"run.dir={folder}/none", *case.settings(model, 1)])
    given, out = folder / f"trl-{threads}.given", folder / f"trl-{threads}.json"
    given.write_bytes(msgspec.json.encode(_as_trl_wants(config, case, out, threads)))
    environment = {"PYTHONPATH": os.pathsep.join([str(TRL), str(ROOT)]), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.small_scale.with_trl", str(given)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise WaitTimeout("TRL in bench peers", f"{case.steps} steps", _LIMIT_S) from error
    if done.returncode:
        raise InvariantBroken(f"bench peers: TRL ended with status {done.returncode}: {done.stderr[-2000:]}")
    steps = [Told(**one) for one in json.loads(out.read_text())]
    return figures(steps, config.rollout.batch)


def _as_trl_wants(config: Config, case: SmallCase, out: Path, threads: int) -> dict[str, Any]:
    asked = tasks.load(config, Tokenizer(config.model.path)).training
    optimizer = config.trainer.optimizer
    return {
        "model": str(config.model.path),
        "prompts": [asked.prompt(group).text for group in range(case.steps * config.rollout.groups_per_step)],
        "out": str(out),
        "steps": case.steps,
        "group": config.rollout.group_size,
        "longest": case.longest,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "clip_grad": optimizer.clip_grad,
        "clip": config.objective.clip_low,
        "temperature": config.rollout.temperature,
        "seed": config.run.seed,
        "threads": threads,
    }


def _version() -> str:
    return next((path.name.removesuffix(".dist-info") for path in sorted(TRL.glob("trl-*.dist-info"))), "unknown")


def table(found: dict[str, Any]) -> str:
    """A line an arm."""
    roles = (*ours.ROLES, "trl")
    lines = [f"CPU ms a sample   {''.join(f'{name:>11}' for name in roles)}{'samples/s':>11}{'tokens':>8}{f's to {LEVEL}':>9}"]
    for name, case in found["cases"].items():
        for arm in ARMS:
            if (one := case.get(arm)) is None:
                continue
            spent = "".join(f"{one['cpu_ms'][role]:11.2f}" if role in one["cpu_ms"] else f"{'':>11}" for role in roles)
            reached = "-" if one["reached_s"] is None else f"{one['reached_s']:.1f}"
            lines.append(f"{name + ' ' + arm:<18}{spent}{one['samples_per_s']:11.1f}{one['tokens']:8.1f}{reached:>9}")
            for alone in (kind for kind in ("raw", "bare") if kind in one):
                made = one[alone]
                rate = f"{made['samples_per_s']:11.1f}{made['tokens']:8.1f}"
                lines.append(f"{'  engine, ' + alone:<18}{'':>44}{made['cpu_ms']:11.2f}{'':>11}{rate}")
    if not found["trl"].startswith("trl"):
        lines.append(f"TRL is left out: {found['trl']}")
    return "\n".join(lines)
