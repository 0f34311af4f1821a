"""Workloads: named distributions of response lengths, tool calls between turns, and the recorded groups of a run.

A distribution is a function from a standard normal z to tokens, F^-1(Phi(z)). The members of a group share part of their z, so that
responses to one prompt have similar lengths (`icc`, the intra-class correlation of z: 0 independent, 1 equal).

The named workloads are from PolyTrace, "RL in the Wild" (arXiv 2509.25279): the mixture of Intern-S1 math, and the turns and tool latencies
of Search-R1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from asyncmoe.errors import ConfigError, DataError
from asyncmoe.telemetry.samples.index import lines
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES, SampledGroup, SampledMember

Floats = NDArray[np.float64]
Quantile = Callable[[Floats], Floats]
Episode = tuple[tuple[int, ...], tuple[float, ...]]
"""Tokens sampled in each turn, and seconds of the tool call after each turn except the last."""

_GRID = 4096
_BLOCK = 1024
"""Number of groups drawn at a time."""
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Workload:
    """Distribution of episodes.

    Attributes:
        name: the workload as the user wrote it.
        tokens: tokens sampled in a turn, by z.
        icc: intra-class correlation of a group's z.
        turns: weights of 1, 2, ... turns.
        tool: seconds of a tool call, by z; None: calls take no time.
        recorded: groups of a run, from which groups are drawn at random instead; everything else then has no effect.
    """

    name: str
    tokens: Quantile
    icc: float = 0.0
    turns: tuple[float, ...] = (1.0,)
    tool: Quantile | None = None
    recorded: Sequence[Sequence[Episode]] = ()

    def groups(self, size: int, seed: int) -> Iterator[list[Episode]]:
        """Yield groups of `size` episodes endlessly; the same seed gives the same groups."""
        block = 0
        while True:
            yield from self._block(np.random.default_rng([seed, block]), size)
            block += 1

    def _block(self, rng: np.random.Generator, size: int) -> list[list[Episode]]:
        if self.recorded:
            return [self._drawn(rng, size) for _ in range(_BLOCK)]
        shape = (_BLOCK, size, len(self.turns))
        shared, own = rng.standard_normal((_BLOCK, 1, 1)), rng.standard_normal(shape)
        z = math.sqrt(self.icc) * shared + math.sqrt(1 - self.icc) * own
        tokens = np.maximum(1, np.rint(self.tokens(z))).astype(np.int64)
        if len(self.turns) == 1:
            return [[((n,), ()) for n in group] for group in tokens[:, :, 0].tolist()]
        count = 1 + rng.choice(len(self.turns), size=shape[:2], p=np.array(self.turns) / sum(self.turns))
        tools = np.zeros(shape) if self.tool is None else self.tool(rng.standard_normal(shape))
        return [
            [(tuple(n[:turns]), tuple(s[: turns - 1])) for n, s, turns in zip(*members, strict=True)]
            for members in zip(tokens.tolist(), tools.tolist(), count.tolist(), strict=True)
        ]

    def _drawn(self, rng: np.random.Generator, size: int) -> list[Episode]:
        """Draw a recorded group with `size` members, without repetition if it has enough."""
        group = self.recorded[int(rng.integers(len(self.recorded)))]
        return [group[int(member)] for member in rng.choice(len(group), size, replace=len(group) < size)]


# ---------------------------------------------------------------- distributions


def fixed(tokens: float) -> Quantile:
    """A constant length."""
    return lambda z: np.full(z.shape, float(tokens))


def lognormal(median: float, sigma: float, cap: float) -> Quantile:
    """`median` times exp of a normal with standard deviation `sigma`, capped at `cap`."""
    return lambda z: np.minimum(cap, median * np.exp(sigma * z))


def mixture(parts: Sequence[tuple[float, float, float]], cap: float) -> Quantile:
    """A mixture of normals (weight, mean, standard deviation), clipped to the range from 1 to `cap`."""
    total = sum(weight for weight, _, _ in parts)
    x = np.linspace(1, max(mean + 6 * deviation for _, mean, deviation in parts), _GRID)
    below = np.sum([[weight / total * NormalDist(mean, deviation).cdf(v) for v in x.tolist()] for weight, mean, deviation in parts], 0)
    inside = (below > 1e-12) & (below < 1 - 1e-12)
    points, z = x[inside], np.array([NormalDist().inv_cdf(p) for p in below[inside].tolist()])
    return lambda at: np.minimum(cap, np.interp(at, z, points))


# ---------------------------------------------------------------- named workloads

_MATH = ((0.359, 4959, 2192), (0.074, 12720, 6067), (0.373, 9175, 3416), (0.194, 17655, 5267))

_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "lognormal": {"median": 4096, "sigma": 1, "cap": 32768, "icc": 0},
    "fixed": {"tokens": 1024},
    "math": {"cap": 32768, "icc": 0},
    "search": {"icc": 0.28, "median_s": 0.16, "sigma_s": 1.5, "cap_s": 3.8},
}


def parse(text: str) -> Workload:
    """Parse `name`, `name:key=value,...` or the path of a run's directory.

    Names: lognormal (median, sigma, cap), fixed (tokens), math (Intern-S1's mixture; cap), and search (Search-R1: 2 to 5 turns, and between
    them tool calls with lognormal durations: median_s, sigma_s, cap_s). All but fixed take icc.

    Raises:
        ConfigError: an unknown name or key, or an invalid value.
        DataError: see `recorded`.
    """
    name, values = spec(text)
    if values is None:
        return Workload(text, fixed(1), recorded=recorded(Path(text)))
    return replace(_build(name, values), name=text, icc=values.get("icc", 0.0))


def spec(text: str) -> tuple[str, Mapping[str, float] | None]:
    """Return the name of a workload and the values of its keys (None for a directory, which is not read).

    Raises:
        ConfigError: the text is neither a workload nor a directory.
    """
    name, _, rest = text.partition(":")
    if name not in _DEFAULTS:
        if not Path(text).is_dir():
            raise ConfigError("workload", got=repr(text), expected=f"one of {', '.join(_DEFAULTS)}, or a run's directory")
        return name, None
    values = dict(_DEFAULTS[name])
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in values:
            raise ConfigError("workload", got=f"{part!r} of {name}", expected=f"key=value with one of the keys {', '.join(values)}")
        values[key] = _number(name, key, value)
    return name, values


def _number(name: str, key: str, value: str) -> float:
    least, most = {"icc": (0.0, 1.0), "sigma": (0.0, 10.0), "sigma_s": (0.0, 10.0)}.get(key, (1e-3, float(_MOST_TOKENS)))
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ConfigError("workload", got=f"{key}={value} of {name}", expected=f"a number from {least:g} to {most:g}")
    return number


def _build(name: str, v: Mapping[str, float]) -> Workload:
    match name:
        case "lognormal":
            return Workload(name, lognormal(v["median"], v["sigma"], v["cap"]))
        case "fixed":
            return Workload(name, fixed(v["tokens"]))
        case "math":
            return Workload(name, mixture(_MATH, v["cap"]))
    tool = lognormal(v["median_s"], v["sigma_s"], v["cap_s"])
    return Workload(name, lognormal(60, 0.7, 4096), turns=(0, 0.6, 0.25, 0.1, 0.05), tool=tool)


# ---------------------------------------------------------------- recorded workloads


def recorded(run_dir: Path) -> list[list[Episode]]:
    """Return the episodes of the groups that a run has kept (`asyncmoe.telemetry.samples`); the run may still be running.

    Kept groups are chosen by number alone, so their lengths are representative. With several agents or paths, each trajectory counts as
    an episode.

    Raises:
        DataError: the run has kept no groups yet, or a record is malformed.
    """
    groups = [record for record, _ in lines(run_dir / FOLDER / ROLLOUT_SAMPLES) if isinstance(record, SampledGroup)]
    found = [[episode for member in group.members if (episode := _episode(member))] for group in groups]
    if not any(found):
        expected = "the directory of a run that has trained, and keeps groups (telemetry.samples.groups)"
        raise DataError(str(run_dir), got="no kept groups", expected=expected)
    return [group for group in found if group]


def _episode(member: SampledMember) -> Episode | None:
    """Return the turns of a complete trajectory; the seconds of its tool calls are spread evenly over the gaps between turns."""
    turns = tuple(count for role, count in member.roles if role == "response" and count)
    if member.digest is None or not turns:
        return None
    gaps = len(turns) - 1
    return turns, (sum(call.seconds for call in member.calls) / gaps,) * gaps if gaps else ()
