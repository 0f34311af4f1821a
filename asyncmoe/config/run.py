"""The run: its directory, its length, how engines and trainer take turns, and its supervised warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from asyncmoe.config.fields import NonNegative, Positive, PositiveFloat, Section


class RunSection(Section):
    """Where the run writes, how long it lasts, and how engines and trainer take turns."""

    dir: Path
    """Run directory: checkpoints, logs, records and the report. Starting again with the same directory resumes the run."""
    steps: Positive
    """Reinforcement-learning steps, not counting warmup.steps."""
    mode: Literal["async", "sync", "one_step_off"] = "async"
    """async: engines and trainer run at the same time, within the bound of queue.staleness.max_staleness. sync and one_step_off are
    baselines. sync: each batch is sampled with the weights that it then trains, so engines and trainer take turns (sets max_staleness 0).
    one_step_off: each batch is sampled while the previous one is trained, and is complete before the engines get new weights (sets
    max_staleness 1 and rollout.interruption drain)."""
    seed: NonNegative = 0
    """Seed of every random draw: prompts, sampling."""
    deterministic: bool | None = None
    """The trainer computes the same bits again from the same record (`asyncmoe replay`), if parallel sizes, threads, type of processor and
    library versions are the same. null: true on CPUs, where a step takes 0.5 % longer (tiny mixture, one thread), false on GPUs, where the
    price is unknown and trainer.megatron.moe_token_dispatcher_type flex is excluded."""
    new_data_at: NonNegative | None = None
    """Step of the checkpoint from which the run may resume with other task and evaluation keys than before; null: they must be the same."""
    controller_restarts: NonNegative = 2
    """How many times in a row, without a new step in between, the controller is restarted after a signal ended it (killed, crashed, out of
    memory). The trainer restarts with it, from the newest checkpoint, while engines wait (engines.orphan_s). 0: losing the controller ends
    the run."""


class WarmupSection(Section):
    """Supervised steps on the task's own demonstrations, before reinforcement learning."""

    steps: NonNegative = 0
    """Supervised steps; 0: none. A random model needs some, a real checkpoint none."""
    batch: Positive = 64
    """Demonstrations per step."""
    lr: PositiveFloat = 1e-3
    """Constant learning rate of the warm-up."""
    wrong_share: float = Field(0.0, ge=0, lt=1)
    """With task.kind arithmetic: share of demonstrations with a wrong answer, to leave something for RL to improve."""
