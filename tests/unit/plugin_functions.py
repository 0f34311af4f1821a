"""Parts of an objective as users write them, good and bad."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncmoe.models import qwen3_moe
from asyncmoe.trainer.objective import PolicyRows, Responses, exp

NUMBER = 3
SAME = replace(qwen3_moe.FAMILY)
OTHER = replace(qwen3_moe.FAMILY, name="other", also=("another",))
_calls = itertools.count()


def _missing(hf: Any) -> Any:
    return hf["no_such_key"]


BROKEN = replace(qwen3_moe.FAMILY, router=_missing)
WRONG_TYPE = replace(qwen3_moe.FAMILY, shape_of=lambda hf: 3)  # type: ignore[arg-type, return-value]


def ppo(rows: PolicyRows, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    """The built-in loss, in its own operations."""
    ratio = exp(rows.logprobs - rows.proximal)
    return torch.maximum(-rows.advantages * ratio, -rows.advantages * ratio.clamp(1.0 - low, 1.0 + high))


def ppo_with_metrics(rows: PolicyRows, low: float = 0.2, high: float = 0.2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return ppo(rows, low, high), {"ratio": exp(rows.logprobs - rows.behaviour).detach(), "sampled": rows.mask}


def truncated(rows: PolicyRows) -> torch.Tensor:
    """The built-in weight "token"."""
    return exp(rows.proximal.double() - rows.behaviour.double())


def young(rows: PolicyRows, ages: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (rows.ages <= ages).float(), {"age": rows.ages}


def centred(responses: Responses) -> np.ndarray:
    """The built-in "dr_grpo"."""
    mean = np.bincount(responses.groups, responses.rewards) / np.bincount(responses.groups)
    return responses.rewards - mean[responses.groups]


def no_argument() -> None: ...


def raises(given: Any) -> Any:
    raise ZeroDivisionError("no\nmean")


def tempered(rows: PolicyRows, *, tau: float, **others: float) -> torch.Tensor:
    return rows.logprobs * tau


def exits(given: Any) -> Any:
    raise SystemExit(3)


def none(given: Any) -> None: ...


def detached(rows: PolicyRows) -> torch.Tensor:
    return rows.advantages * 2


def unclamped(rows: PolicyRows) -> torch.Tensor:
    return -rows.advantages * (rows.logprobs - rows.behaviour).exp()


def infinite_gradient(rows: PolicyRows) -> torch.Tensor:
    return (rows.logprobs - rows.logprobs.detach()).abs().sqrt()


def random_loss(rows: PolicyRows) -> torch.Tensor:
    return rows.logprobs * torch.rand(())


def across_sequences(rows: PolicyRows) -> torch.Tensor:
    return rows.logprobs - rows.logprobs[rows.mask].sum()


def changes_advantages(rows: PolicyRows) -> torch.Tensor:
    rows.advantages.mul_(2.0)
    return rows.logprobs * rows.advantages


def mean_metric(rows: PolicyRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return rows.logprobs * 2, {"mean": rows.logprobs.mean()}


def nan_metric(rows: PolicyRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return rows.logprobs * 2, {"log": rows.advantages.log()}


def other_metrics(rows: PolicyRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return rows.logprobs * 2, {"many": rows.mask} if rows.sequences > 1 else {}


def negative(rows: PolicyRows) -> torch.Tensor:
    return rows.advantages


def breaks_later(rows: PolicyRows) -> torch.Tensor:
    return torch.where(rows.behaviour == -3.0, torch.nan, rows.logprobs)


def writes(responses: Responses) -> np.ndarray:
    responses.rewards[:] = 0.0
    return responses.rewards


def stateful(responses: Responses) -> np.ndarray:
    return responses.rewards + next(_calls)


def not_a_number(responses: Responses) -> np.ndarray:
    return np.where(responses.sampled > 0, responses.rewards, np.nan)


def whole_numbers(responses: Responses) -> np.ndarray:
    return responses.groups


def nan_of_responses(responses: Responses) -> tuple[np.ndarray, dict[str, Any]]:
    return responses.rewards, {"mean": float("nan")}


def whole_sequences(rows: PolicyRows) -> torch.Tensor:
    return rows.spread(exp(rows.mean(rows.logprobs - rows.behaviour))).double()


def own_sums(rows: PolicyRows) -> torch.Tensor:
    place = torch.where(rows.segments < 0, rows.sequences, rows.segments)
    log_ratio = torch.where(rows.mask, rows.logprobs - rows.behaviour, 0.0).double()
    return exp(torch.zeros(rows.sequences + 1, dtype=torch.float64).index_add_(0, place, log_ratio))[place]


def nothing_without_tokens(rows: PolicyRows) -> torch.Tensor:
    return whole_sequences(rows) if rows.mask.any() else torch.ones_like(rows.logprobs).double()


def of_metrics(responses: Responses) -> tuple[np.ndarray, dict[str, float]]:
    named = {name: float(np.nansum(responses.metrics[name])) for name in ("words", "rare", "other")}
    return responses.metrics["format"].copy(), named
