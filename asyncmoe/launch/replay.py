"""`asyncmoe replay` and `asyncmoe fork`: train the recorded steps of a run again, by ranks on this machine, without engines."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from asyncmoe import checkpoints, models, storage
from asyncmoe import config as configuration
from asyncmoe.checkpoints import directories
from asyncmoe.checkpoints.manifest import MANIFEST
from asyncmoe.config import Config, moved
from asyncmoe.config.telemetry import TelemetrySection
from asyncmoe.errors import AsyncmoeError, ConfigError, UserError
from asyncmoe.flight import pack, records
from asyncmoe.flight.batches import Batches
from asyncmoe.flight.source import ConfiguredSteps, RecordedRun, ranges
from asyncmoe.flight.stage import FINDINGS, Stage, StepFinding
from asyncmoe.flight.verdict import Items, verdict
from asyncmoe.launch.torchrun import THREADS, trainer_command, trainer_environment
from asyncmoe.log import belonging
from asyncmoe.log.belonging import Belonging
from asyncmoe.models import origin
from asyncmoe.process import WARNING, Child
from asyncmoe.rollout import run_log
from asyncmoe.scratch import Scratch
from asyncmoe.telemetry.records import Tail, read_steps
from asyncmoe.telemetry.schema import METRICS, Step

_POLL_S = 0.5
_FAR = 0.5
"""Effective sample size, as a share, below which a fork's policy is too far from the recorded batches."""
Steps = tuple[int, int]
"""First and last step, both included."""


def replay(run_dir: Path, steps: Steps | None, overrides: Sequence[str], tokens: bool = False) -> bool:
    """Train recorded steps again, and compare. Writes nothing to the run, which may have been moved or copied. Return whether the bits are
    equal.

    Args:
        steps: None: all that can be trained again.
        overrides: keys of another layout or machine; the result is then a bound.
        tokens: also look for tokens that fit another version than theirs.

    Raises:
        UserError: the steps cannot be trained again.
        AsyncmoeError: a rank failed.
    """
    if any(one.startswith("run.dir=") for one in overrides):
        raise ConfigError("run.dir", got="a directory", expected="none: a replay leaves nothing; asyncmoe fork makes a run")
    source = _opened(run_dir)
    first, last = steps or source.newest
    done, scratch = source.base(first - 1), Scratch()
    target = scratch.path / "replay"
    _train(source, done, last, target, overrides, source.checkpoint(done), tokens=tokens)
    found = Tail(target / FINDINGS).poll_as(StepFinding)
    equal, lines = verdict(source.recorded, records.read(target), range(first, last + 1), _items(source.batches), found)
    print(*lines, sep="\n")
    scratch.remove()
    return equal


def fork(run_dir: Path, at: int, overrides: Sequence[str]) -> Path:
    """Train the recorded batches after step `at` with other keys, as far as there are any. Return the directory of the new run.

    Raises:
        UserError: as `replay`; the directory exists.
        AsyncmoeError: a rank failed.
    """
    source, last = _opened(run_dir), at
    config, there = configuration.of_run(run_dir, overrides), {*source.steps}
    end = config.warmup.steps + config.run.steps
    while last + 1 in there and last < end:
        last += 1
    if last == at:
        raise ConfigError("--at", got=at, expected=f"a step before one that can be trained again; these are {ranges(there) or 'none'}")
    named = any(one.startswith("run.dir=") for one in overrides)
    target = config.run.dir if named else run_dir.with_name(f"{run_dir.name}-fork-{at}")
    storage.check_new("fork", target)
    storage.make_private(target)
    try:
        _fork(source, at, last, target, overrides)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)  # nothing goes on with an incomplete fork
        raise
    weak = [one for one in read_steps(target / METRICS) if one.step > at and one.ess is not None and one.ess < _FAR]
    if weak:
        lowest = min(weak, key=lambda one: one.ess or 0.0)
        told = f"below {_FAR:g} from step {weak[0].step} on, {lowest.ess:.2g} at step {lowest.step}"
        print(f"{WARNING}the effective sample size is {told}: the policy is too far from the recorded batches to judge it by them")
    return target


def _fork(source: RecordedRun, at: int, last: int, target: Path, overrides: Sequence[str]) -> None:
    run_dir = source.folder
    if (run_dir / origin.FILE).exists():
        shutil.copy(run_dir / origin.FILE, target)
    done = source.base(at)
    checkpoint = source.checkpoint(done)
    if done < at:
        _train(source, done, at, target, (), checkpoint, keeps=True)
        checkpoint = directories.directory(target, at)
    _train(source, at, last, target, overrides, checkpoint, forks=True, keeps=True)


def against(run_dir: Path, other: Path) -> bool:
    """Compare the records of two runs, and print the first difference. Return whether there is none."""
    one, two = records.read(run_dir), records.read(other)
    batches = Batches(run_dir, configuration.of_run(run_dir).log) if belonging.read(run_dir) else None  # a fork has no log
    both = sorted(one.steps.keys() & two.steps.keys())
    if not both:
        got = f"steps {ranges(one.steps)} and {ranges(two.steps)}"
        raise UserError("--against", got=got, expected="two runs that have records of the same steps")
    equal, lines = verdict(one, two, range(both[0], both[-1] + 1), _items(batches), names=("in the first", "in the second"))
    print(*lines, sep="\n")
    return equal


def _items(batches: Batches | None) -> Items:
    return lambda step: batches.leased(step - 1).items if batches is not None and step - 1 in batches.kept else ()


def _opened(run_dir: Path) -> RecordedRun:
    """Open a run or a pack, whose files are verified and whose plug-ins are found from now on. Raises UserError."""
    if (run_dir / MANIFEST).exists():
        pack.verify(run_dir)
        own = str((run_dir / pack.PLUGINS).absolute())
        sys.path.insert(1, own)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    return RecordedRun.of(run_dir)


def _train(
    source: RecordedRun,
    done: int,
    last: int,
    target: Path,
    overrides: Sequence[str],
    checkpoint: Path | None,
    *,
    forks: bool = False,
    keeps: bool = False,
    tokens: bool = False,
) -> None:
    """Train steps `done + 1` to `last` into the directory `target`.

    Args:
        checkpoint: the one to begin with; None: the model's files.
        forks: the configuration of the first step decides, with the overrides; else each step is repeated as it was.
        keeps: save a checkpoint of the last step.
    """
    parts = source.stretches(done, last)
    parts = [ConfiguredSteps(parts[0].start, done, last)] if forks else parts
    for part in parts:
        config = _config(source, part, target, overrides)
        for fault in () if checkpoint is None else checkpoints.kind_faults(checkpoint, config.checkpoint_kind):
            raise fault
        begin = "" if checkpoint is None else str(checkpoint.absolute())
        stage = Stage(str(source.folder.absolute()), begin, part.last, not forks, keeps or part is not parts[-1], tokens)
        _run(config, stage, part.start.circumstances.get("threads"))
        checkpoint = directories.directory(target, part.last)


def _config(source: RecordedRun, part: ConfiguredSteps, target: Path, overrides: Sequence[str]) -> Config:
    """Write and return the configuration of a stretch.

    Raises:
        ConfigError: an override is refused, or needs what engines did not record.
    """
    file = target / moved.FILE
    storage.make_private(target)
    file.write_text(yaml.safe_dump(part.start.config))
    config = moved.absolute(configuration.of_run(source.folder, [one for one in overrides if not one.startswith("run.dir=")], file=file))
    _check_recorded(config, belonging.read(source.folder))
    telemetry = TelemetrySection(samples=config.telemetry.samples.model_copy(update={"groups": 0}))
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": target.absolute()}), "telemetry": telemetry})
    file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return config


def _check_recorded(config: Config, known: Belonging | None) -> None:
    """Refuse a configuration that needs what engines did not record. Raises ConfigError."""
    for key, value in run_log.identity(config, models.recording(config, models.hf_config_of(config))).items():
        then = value if known is None else known.of.get(key, value)
        if value not in (then, "off", "0"):
            raise ConfigError(key, got=value, expected=f"{then}, as the recorded batches have it")


def _run(config: Config, stage: Stage, threads: str | None) -> None:
    """Run the ranks of a stage, with as many threads each as when the steps were recorded; print a line for each step.

    Raises:
        AsyncmoeError: a rank failed. No time limit: collectives have one (`trainer.timeout_s`), and a step takes as long as it takes.
    """
    folder = config.run.dir
    file, scratch = folder / "stage.json", Scratch()  # a failure leaves its log there
    file.write_bytes(msgspec.json.encode(stage))
    environment = trainer_environment(({THREADS: threads} if threads else {}) | os.environ)
    command = trainer_command(config, folder / moved.FILE, "asyncmoe.trainer.recorded", str(file))
    child = Child("replay", command, scratch.path / "replay.log", environment)
    steps = Tail(folder / METRICS)
    steps.poll_steps()
    try:
        while not child.wait(_POLL_S):
            _show(steps, stage.last)
        _show(steps, stage.last)
        if child.returncode != 0:
            raise AsyncmoeError(child.why(), exit_code=UserError.exit_code)  # 1 says that bits differ
    finally:
        child.end(5.0)
    scratch.remove()


def _show(steps: Tail, last: int) -> None:
    for one in steps.poll_steps():
        if isinstance(one, Step):
            print(f"step {one.step} of {last}: loss {one.loss:.6g}, grad_norm {one.grad_norm:.6g}, {one.step_seconds:.1f} s", flush=True)
