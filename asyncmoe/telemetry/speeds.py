"""The speeds of a run's trainer and engines, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncmoe.config import Config, devices
from asyncmoe.telemetry.format import duration, number, percent
from asyncmoe.telemetry.measured import known, mean
from asyncmoe.telemetry.rollout_schema import Rollout
from asyncmoe.telemetry.schema import Step

SETTLING = 1
"""First steps that are not counted: kernels are compiled, and the optimizer's memory is allocated."""


def speeds(config: Config, parameters: int, steps: Sequence[Step], rollout: Sequence[Rollout]) -> dict[str, Any]:
    """Return the speeds over the RL steps after the first `SETTLING`, as `asyncmoe bench step` writes them.

    A training step lasts `step_s` seconds without its waits for a batch and for weight sync. Engines sample `tokens_per_s`, all together,
    with `running` conversations in each, while they have work. `gpus` counts ranks, also on CPUs. Tokens that were not sampled are prompt
    tokens. `trainer_waits` and `engines_idle` are the shares of `seconds` in which the trainer waited for a batch, and in which an engine
    had no work.

    Args:
        parameters: number of the model's parameters.
        steps: RL steps, oldest first, more than `SETTLING` and longer than the controller's interval between two records.
        rollout: the controller's records, oldest first.
    """
    counted, engines = steps[SETTLING:], config.engines
    during = [one for one in rollout if counted[0].begin <= one.time <= counted[-1].time]
    busy = mean(at_work for one in during for at_work in one.engine_utilization.values()) or 1.0

    def total(name: str) -> float:
        return sum(known(getattr(one, name) for one in counted))

    count, seconds, waited, tokens = len(counted), total("step_seconds"), total("wait_seconds"), total("tokens")
    training = seconds - waited - total("sync_wait_seconds")
    response, running = total("response_tokens_mean") / count, mean(one.running for one in during) or 0.0
    sampled_per_s = (during[-1].generated_tokens - during[0].generated_tokens) / (during[-1].time - during[0].time)
    at_once = max(1, min(round(running / busy / engines.count), engines.max_running))
    trainer = {"gpus": config.trainer.ranks, "tokens": round(tokens / count), "step_s": training / count, "tokens_per_s": tokens / training}
    sampling = {"gpus": engines.count * engines.tp, "running": at_once, "tokens_per_s": sampled_per_s / busy}
    return {
        "format": 1,
        "parameters": parameters,
        "trainer": trainer,
        "engines": sampling,
        "lengths": {"prompt": response * (tokens / total("sampled_tokens") - 1), "response": response},
        "measured": {"steps": count, "seconds": seconds, "trainer_waits": waited / seconds, "engines_idle": 1 - busy},
    }


def described(found: Mapping[str, Any]) -> str:
    """Describe the speeds in a few lines."""
    trainer, engines, over = (found[name] for name in ("trainer", "engines", "measured"))
    step_s, trained, sampled = number(trainer["step_s"], "s"), number(trainer["tokens_per_s"]), number(engines["tokens_per_s"])
    return f"""\
trainer, {devices.counted(trainer["gpus"], "rank")}: {step_s} a step of {trainer["tokens"]:,} tokens, {trained} tokens/s
engines, {devices.counted(engines["gpus"], "rank")}: {sampled} tokens/s with {engines["running"]} conversations at once in each
of {duration(over["seconds"])}, the trainer waited {percent(over["trainer_waits"])}; engines idled {percent(over["engines_idle"])}"""
