"""TRL's GRPOTrainer on the same model, prompts, batches and loss as an arm of ours: python -m benchmarks.learning.with_trl SEED STEPS OUT

Needs trl (requirements/trl.txt). Both cores sample, then both train, as TRL does with transformers' own generation on a CPU. Seconds leave
out the evaluations, which TRL would wait for.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tasks import Tasks
from asyncmoe.rollout.tasks.order import EVALUATION
from asyncmoe.rollout.tokenizer import Tokenizer
from benchmarks.learning import arms
from examples.real.tasks import number

_EVERY, _MICRO = 6, 16


class Evaluated(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Greedy answers to the held-out questions, every few steps, and the clock without them."""

    def __init__(self, questions: Tasks, tokenizer: Any, longest: int, batch: int) -> None:
        (held,) = questions.sets
        asked = [held.task.prompt(index, EVALUATION) for index in range(held.count)]
        self._ids = [list(one.tokens) for one in asked]
        self._answers = [one.answer for one in asked]
        self._tokenizer, self._longest, self._batch = tokenizer, longest, batch
        self._begin, self._away = time.monotonic(), 0.0
        self.ends: list[float] = []
        self.told: dict[str, list[float]] = {"samples": [], "seconds": [], "accuracy": []}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._begin, self._away = time.monotonic(), 0.0
        self._evaluate(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ends.append(self._elapsed())
        if state.global_step % _EVERY == 0:
            self._evaluate(model, state.global_step)

    def _elapsed(self) -> float:
        return time.monotonic() - self._begin - self._away

    def _evaluate(self, model: Any, step: int) -> None:
        seconds, begin = self._elapsed(), time.monotonic()
        padded = self._tokenizer.pad({"input_ids": self._ids}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            said = model.generate(**padded, do_sample=False, max_new_tokens=self._longest)[:, padded["input_ids"].shape[1] :]
        texts = self._tokenizer.batch_decode(said, skip_special_tokens=True)
        right = [number("", text, answer) for text, answer in zip(texts, self._answers, strict=True)]
        self.told["samples"].append(step * self._batch)
        self.told["seconds"].append(round(seconds, 1))
        self.told["accuracy"].append(sum(right) / len(right))
        self._away += time.monotonic() - begin


def right(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """The reward, as TRL asks for it."""
    return [number("", one[0]["content"], wanted) for one, wanted in zip(completions, answer, strict=True)]


def train(config: Config, steps: int) -> dict[str, Any]:
    """Return what `curves.curves` does of a run, as far as TRL says it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    rollout, optimizer, objective = config.rollout, config.trainer.optimizer, config.objective
    questions, tokenizer = tasks.load(config, Tokenizer(config.model.path)), AutoTokenizer.from_pretrained(config.model.path)
    asked = [questions.training.prompt(group) for group in range(steps * rollout.groups_per_step)]
    rows = Dataset.from_list([{"prompt": list(one.messages or ()), "answer": one.answer} for one in asked])
    evaluated = Evaluated(questions, tokenizer, rollout.max_new_tokens, rollout.batch)
    with tempfile.TemporaryDirectory() as folder:
        given = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,  # weights in float32, matrix products in bfloat16
            seed=config.run.seed,
            max_steps=steps,
            per_device_train_batch_size=_MICRO,
            gradient_accumulation_steps=rollout.batch // _MICRO,
            num_generations=rollout.group_size,
            shuffle_dataset=False,
            max_completion_length=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_k=0,
            top_p=1.0,
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=optimizer.clip_grad,
            beta=objective.kl.coefficient,
            epsilon=objective.clip_low,
            loss_type="dapo",  # the mean over all tokens of a batch, as objective.aggregation token_mean
            scale_rewards="group",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        )
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        trainer = GRPOTrainer(model, right, given, rows, processing_class=tokenizer, callbacks=[evaluated])
        trainer.train()
    logged = [one for one in trainer.state.log_history if "reward" in one]
    tokens = sum(one["completions/mean_length"] * rollout.batch for one in logged)
    return {
        "samples": [(step + 1) * rollout.batch for step in range(steps)],
        "seconds": [round(end, 1) for end in evaluated.ends],
        "reward_mean": [one["reward"] for one in logged],
        "entropy": [one.get("entropy") for one in logged],
        "grad_norm": [one.get("grad_norm") for one in logged],
        "response_tokens_mean": [one["completions/mean_length"] for one in logged],
        "tokens_per_s": round(tokens / evaluated.ends[-1], 1),
        "evaluations": evaluated.told,
    }


def main() -> None:
    """Write the record to OUT."""
    seed, steps, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    (arm,) = arms.chosen(["dense-sync"])
    config = configuration.load(arms.CONFIGURATION, arms.overrides(arm, seed, out.with_suffix(".run"), steps))
    out.write_text(json.dumps(train(config, steps)))


if __name__ == "__main__":
    main()
