"""What is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncmoe.errors import UserError

CONFIGURATION = Path("examples/real/sums.yaml")
DENSE, MIXTURE = Path("runs/models/smollm2"), Path("runs/models/smollm2-moe")
DEMO = Path("runs/models/tiny-qwen3-moe")
_COMMON = (
    "objective.kl.coefficient=0",
    "evaluation.max_concurrent=64",
)
_EVERY, _GROUPS = 6, 4
_UNCORRECTED = "objective.correction.weight=none"
_UNGUARDED = "verify.anomalies.kl_engine.action=warn"
_DEMO = ("rollout.groups_per_step=16", "evaluation.every=20", "evaluation.prompts=100", "queue.staleness.max_staleness=0", "run.mode=sync")
_MIXTURE = ("keep.routing=true", "queue.staleness.max_staleness=1")


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        settings: overrides of the configuration.
        environment: variables of the run.
        about: what it is.
        trl: TRL trains it, not asyncmoe.
        configuration: of its run, before `settings`.
        split: a step has this part of the samples, and there are as many times as many, so that tokens can get as many versions old.
    """

    name: str
    model: Path
    about: str
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    trl: bool = False
    split: int = 1
    configuration: Path = CONFIGURATION


ARMS = (
    Arm("dense-async", DENSE, "engine and trainer at the same time, one core each; tokens are up to one version old"),
    Arm(
        "dense-async-both-cores",
        DENSE,
        "two trainer ranks on two cores, and an engine that takes what it needs of both",
        ("trainer.ranks=2",),
    ),
    Arm("dense-sync", DENSE, "engine and trainer in turn, one core each", ("run.mode=sync",)),
    Arm("dense-sync-both-cores", DENSE, "engine and trainer in turn, each on both cores", ("run.mode=sync",), {"OMP_NUM_THREADS": "2"}),
    Arm("dense-trl", DENSE, "TRL's GRPOTrainer with transformers' own generation, each on both cores", trl=True),
    Arm("moe", MIXTURE, "the mixture: routes replayed, tokens weighted (TIS, cap 2), tokens are up to one version old", _MIXTURE),
    Arm("moe-routing-off", MIXTURE, "routes are not replayed", (*_MIXTURE, "keep.routing=false")),
    Arm("moe-uncorrected", MIXTURE, "no importance weights", (*_MIXTURE, _UNCORRECTED)),
    Arm(
        "moe-lora",
        MIXTURE,
        "adapters of attention and all experts instead of all weights",
        (*_MIXTURE, "train=lora", "lora={rank: 8, alpha: 128}"),
    ),
    Arm(
        "moe-sequence-mask",
        MIXTURE,
        "no importance weights; responses whose ratio is outside [0.5, 2] are rejected",
        (*_MIXTURE, "objective.correction={weight: none, sequence_band: [0.5, 2.0]}"),
    ),
    *(
        Arm(
            f"moe-small-steps{name}", MIXTURE, f"four times as many steps of a quarter of the samples; {about}", (*_MIXTURE, *more), split=4
        )
        for name, about, more in (
            ("", "tokens are up to one version old", ()),
            ("-eta-64", "tokens are up to 64 versions old", ("queue.staleness.max_staleness=64",)),
            (
                "-eta-64-uncorrected",
                "up to 64, no importance weights, and batches far from the trainer are trained on too, not skipped",
                ("queue.staleness.max_staleness=64", _UNCORRECTED, _UNGUARDED),
            ),
            ("-eta-16", "tokens are up to 16 versions old", ("queue.staleness.max_staleness=16",)),
            ("-eta-4", "tokens are up to 4 versions old", ("queue.staleness.max_staleness=4",)),
        )
    ),
    *(
        Arm(f"demo-{placement}", DEMO, about, (*_DEMO, f"placement={placement}"), configuration=Path("examples/demo.yaml"))
        for placement, about in (
            ("split", "the demo of a random mixture; engine and trainer in turn, and both stay in memory"),
            ("colocated", "the same; each gives its memory to the other"),
        )
    ),
)


def chosen(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return the arms of these names, or all.

    Raises:
        UserError: there is no such arm.
    """
    known = {arm.name: arm for arm in ARMS}
    if unknown := [name for name in names if name not in known]:
        raise UserError("--arms", got=unknown[0], expected=f"some of {', '.join(known)}")
    return tuple(known[name] for name in names) or ARMS


def numbers(seeds: str) -> tuple[int, ...]:
    """Return seeds separated by commas, each once.

    Raises:
        UserError: the text is something else.
    """
    found = tuple(dict.fromkeys(int(seed) for seed in seeds.split(",") if seed.isascii() and seed.isdigit()))
    if not found or len(found) < len(seeds.split(",")):
        raise UserError("--seeds", got=seeds, expected="different whole numbers, separated by commas: 0,1,2")
    return found


def rates(text: str) -> tuple[float, ...]:
    """Return learning rates separated by commas. Raises UserError."""
    try:
        found = tuple(float(rate) for rate in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < 1 for rate in found):
        raise UserError("--rates", got=text, expected="learning rates between 0 and 1, separated by commas: 2e-5,2e-6")
    return found


def overrides(arm: Arm, seed: int, run_dir: Path, steps: int) -> list[str]:
    """Return the arguments of `asyncmoe run` after the configuration, for as many samples as `steps` steps have there. Later ones win."""
    of_run = (f"run.dir={run_dir}", f"run.seed={seed}", f"run.steps={steps * arm.split}", f"model.path={arm.model}")
    of_steps = (
        f"rollout.groups_per_step={_GROUPS // arm.split}",
        f"evaluation.every={_EVERY * arm.split}",
        f"trainer.checkpoint_every={20 * arm.split}",
    )
    return [*of_run, *of_steps, *_COMMON, *arm.settings]
