"""TRL's arm, a process of its own with TRL on its path: python -m benchmarks.small_scale.with_trl FILE, which holds `TrlCase` and gets a
line of JSON for each step.

As TRL is cheapest here: a batch is one micro-batch, generation by transformers in the same process, weights in float32, no reference
model, no checkpoints, no evaluation; threads as given.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.small_scale.task import share


class TrlCase(msgspec.Struct):
    """What TRL trains on.

    Attributes:
        prompts: of all groups, in order.
        out: file for the steps.
    """

    model: str
    prompts: list[str]
    out: str
    steps: int
    group: int
    longest: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    clip: float
    temperature: float
    seed: int
    threads: int


class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Wall and CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.ends: list[tuple[float, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append((time.monotonic() - self.begin, time.process_time()))


def digits(completions: Sequence[str], places: int = 0, **_: Any) -> list[float]:
    """The reward, as TRL asks for it."""
    return [share(one, places) for one in completions]


def train(case: TrlCase) -> None:
    """Train, and write the steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(case.threads)
    clock, reward = Clock(), partial(digits, places=case.longest)
    reward.__name__ = "digits"  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        given = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            seed=case.seed,
            max_steps=case.steps,
            per_device_train_batch_size=len(case.prompts) // case.steps * case.group,
            gradient_accumulation_steps=1,
            num_generations=case.group,
            shuffle_dataset=False,
            max_completion_length=case.longest,
            temperature=case.temperature,
            top_k=0,
            top_p=1.0,
            learning_rate=case.lr,
            lr_scheduler_type="constant",
            adam_beta1=case.betas[0],
            adam_beta2=case.betas[1],
            adam_epsilon=case.eps,
            weight_decay=case.weight_decay,
            max_grad_norm=case.clip_grad,
            beta=0.0,
            epsilon=case.clip,
            loss_type="dapo",  # the mean over all tokens of a batch, as objective.aggregation token_mean
            scale_rewards="group",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(case.model)
        rows = Dataset.from_list([{"prompt": one} for one in case.prompts])
        trainer = GRPOTrainer(model, reward, given, rows, processing_class=tokenizer, callbacks=[clock])
        trainer.train()
    logged = [one for one in trainer.state.log_history if "reward" in one]
    steps = [
        {"seconds": end, "cpu": {"trl": cpu}, "reward": one["reward"], "tokens": one["completions/mean_length"]}
        for (end, cpu), one in zip(clock.ends, logged, strict=True)
    ]
    Path(case.out).write_text(json.dumps(steps))


if __name__ == "__main__":
    train(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrlCase))
