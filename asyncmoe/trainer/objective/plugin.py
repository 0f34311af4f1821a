"""Parts of the objective that a user wrote: an advantage estimator, a loss, an importance weight (docs/guides/objective.md).

Each is a pure function. Every call checks that its result has the right type, shape and dtype. Values that are not finite are counted over
the step (`Plugin.check`), so that all ranks stop with the same message before any parameter changes.
`asyncmoe.trainer.objective.trial` tries a function on small inputs before a run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncmoe import plugins
from asyncmoe.errors import ConfigError, InvariantBroken, UserError
from asyncmoe.trainer.objective.rows import PolicyRows, Sums

_FAULTS, _REJECTED, _METRIC = "faults", "rejected", "metric"
LOSS, WEIGHT, ADVANTAGE = "objective.loss", "objective.correction.weight", "objective.advantage"
"""The configuration keys that take a user's own function."""


class Columns(dict[str, np.ndarray]):
    """Numbers of n responses, by name. `absent`: float64[n], the numbers under a name that no response has."""

    def __init__(self, named: Mapping[str, np.ndarray], absent: np.ndarray) -> None:
        super().__init__(named)
        self._absent = absent

    def __missing__(self, name: str) -> np.ndarray:
        return self._absent


@dataclass(frozen=True)
class Responses:
    """A whole batch as an advantage estimator sees it: n responses, the same on every rank. The arrays are read-only."""

    rewards: np.ndarray
    """float64[n]; finite."""
    groups: np.ndarray
    """int64[n]; equal for responses of the same agent to the same prompt; numbered from 0 in order of appearance."""
    sampled: np.ndarray
    """int64[n]; number of sampled tokens."""
    tokens: np.ndarray
    """int64[n]; number of tokens, prompt included."""
    oldest_versions: np.ndarray
    """int64[n]; version of the oldest sampled token."""
    newest_versions: np.ndarray
    """int64[n]; version of the newest sampled token."""
    metrics: Mapping[str, np.ndarray]
    """float64[n] by name: the metrics beside the reward, NaN for a response without one; all NaN under a name that no response has."""

    @classmethod
    def of(cls, metrics: Mapping[str, Sequence[float] | np.ndarray] | None = None, **values: Sequence[float]) -> Responses:
        """Make read-only arrays from sequences of n numbers."""
        made = {name: np.array(value, np.float64 if name == "rewards" else np.int64) for name, value in values.items()}
        named = {name: np.array(value, np.float64) for name, value in (metrics or {}).items()}
        absent = np.full(len(made["rewards"]), np.nan)
        for array in (*made.values(), *named.values(), absent):
            array.setflags(write=False)
        return cls(**made, metrics=Columns(named, absent))


@dataclass(frozen=True)
class Plugin:
    """A user's function.

    Attributes:
        key: the configuration key that names it.
        target: its name, `package.module:name`.
        options: its keyword arguments.
        metrics: names of the metrics it reports; known after its trial.
    """

    key: str
    target: str
    function: Callable[..., object]
    options: Mapping[str, Any]
    metrics: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The function's name, file and line."""
        return f"{self.target} ({plugins.place(self.function)})"

    def refused(self, got: str, expected: str, hint: str | None = None) -> ConfigError:
        """Return the error for a wrong result."""
        return ConfigError(self.key, got=f"{got} from {self.where}", expected=expected, hint=hint)

    def call(self, given: object) -> tuple[object, Mapping[Any, Any]]:
        """Call the function and return its result and metrics.

        Raises:
            UserError: the function raised it.
            ConfigError: the function raised any other exception.
        """
        try:
            answer = self.function(given, **self.options)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise self.refused(plugins.told_at(error), "a result; it must not raise an exception") from error
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
            return answer
        return answer, {}

    def of_responses(self, responses: Responses) -> tuple[np.ndarray, dict[str, float]]:
        """Return the advantage of each response, float32[n], and the metrics.

        Raises:
            ConfigError: it raised an exception, or its result is not n finite numbers, or a metric is not a finite number.
        """
        shape = responses.rewards.shape
        value, metrics = self.call(responses)
        if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype not in (np.float32, np.float64):
            raise self.refused(_told(value), f"a numpy array of float32 or float64, {list(shape)}: an advantage for each response")
        if not np.isfinite(value).all():
            at = int(np.flatnonzero(~np.isfinite(value))[0])
            got = f"the advantage {value[at]} of response {at} (reward {responses.rewards[at]:g}, {responses.sampled[at]} sampled tokens)"
            raise self.refused(got, "finite numbers")
        for name, metric in metrics.items():
            if not isinstance(name, str) or not isinstance(metric, float | int | np.number) or not np.isfinite(metric):
                told = _told(metric) if isinstance(metric, np.ndarray) else metric
                raise self.refused(f"the metric {name!r} = {told}", "a finite number by name")
        return value.astype(np.float32), {name: float(metric) for name, metric in metrics.items()}

    def of_rows(self, rows: PolicyRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a number for each row, float32[T] with gradient (a loss) or float64[T] without (a weight), and the metrics, each [T].

        Raises:
            ConfigError: it raised an exception, or its result or a metric is not a tensor of T numbers.
        """
        value, metrics = self.call(rows)
        like = rows.logprobs
        dtypes = (like.dtype,) if self.key == LOSS else (torch.float32, torch.float64)
        if not isinstance(value, torch.Tensor) or (value.shape, value.device) != (like.shape, like.device) or value.dtype not in dtypes:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refused(_told(value), f"a tensor of {words}, {list(like.shape)}, on {like.device}: a number for each row")
        for name, metric in metrics.items():
            if not isinstance(name, str) or not isinstance(metric, torch.Tensor) or metric.shape != like.shape:
                raise self.refused(
                    f"the metric {name!r} = {_told(metric)}", f"a tensor of {list(like.shape)} by name: a number for each row"
                )
        return value if self.key == LOSS else value.detach().double(), dict(metrics)

    @property
    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the sums that `measure` returns."""
        return {self._sum(_FAULTS): (), self._sum(_REJECTED): ()} | {self._sum(_METRIC, name): () for name in self.metrics}

    def measure(self, rows: PolicyRows, value: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> Sums:
        """Return the sums over the sampled rows of a micro-batch: wrong values, rejected rows, and each metric.

        A value is wrong if it is not finite although the row's log-probability and advantage are, or if it is a negative weight.

        Raises:
            ConfigError: the metrics are not those of the trial, so ranks could not add them up.
        """
        if sorted(metrics) != sorted(self.metrics):
            expected = f"{sorted(self.metrics)}, as in its trial before the run"
            raise self.refused(f"the metrics {sorted(metrics)}", expected, "report the same metrics in every call")
        weight = self.key == WEIGHT
        wrong = ~value.isfinite() | (value < 0) if weight else ~value.isfinite()
        sound = rows.mask & rows.logprobs.isfinite() & rows.advantages.isfinite()
        found = {self._sum(_FAULTS): (wrong & sound).sum(), self._sum(_REJECTED): (rows.mask & (value == 0)).sum() * weight}
        found |= {self._sum(_METRIC, name): torch.where(rows.mask, metric, 0).double().sum() for name, metric in metrics.items()}
        return {name: total.detach().double() for name, total in found.items()}

    def figures(self, sums: Mapping[str, Any]) -> tuple[dict[str, float], float]:
        """Return each metric's mean over the step's sampled tokens, and the share of them that the function rejected."""
        tokens = max(float(sums["tokens"]), 1.0)
        means = {f"{self.short}/{name}": float(sums[self._sum(_METRIC, name)]) / tokens for name in self.metrics}
        return means, float(sums[self._sum(_REJECTED)]) / tokens

    def check(self, sums: Mapping[str, Any]) -> None:
        """Refuse a step in which the function returned wrong values.

        Raises:
            InvariantBroken: names the function; the same on every rank.
        """
        if count := int(sums[self._sum(_FAULTS)]):
            expected = "finite numbers, none negative" if self.key == WEIGHT else "finite numbers"
            raise InvariantBroken(f"{self.key}: got {count} wrong values from {self.where}, expected {expected}; no parameter was changed")

    @property
    def short(self) -> str:
        """The last part of the key, which prefixes its metrics."""
        return self.key.rpartition(".")[2]

    def _sum(self, *parts: str) -> str:
        return "/".join((self.key, *parts))


@dataclass(frozen=True)
class Plugins:
    """The user's own parts of an objective; None: the built-in part."""

    advantage: Plugin | None = None
    loss: Plugin | None = None
    weight: Plugin | None = None

    @property
    def of_tokens(self) -> tuple[Plugin, ...]:
        """The functions that see micro-batches."""
        return tuple(one for one in (self.loss, self.weight) if one is not None)

    @property
    def sources(self) -> dict[str, str]:
        """The digest of each function's source file, by its name; equal on all ranks if they run the same code."""
        every = (one for one in (self.advantage, *self.of_tokens) if one is not None)
        return {one.target: plugins.source_digest(one.target) for one in every}


NO_PLUGINS = Plugins()
"""The built-in objective."""


def _told(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}, {list(value.shape)}, on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:80]!r}"
