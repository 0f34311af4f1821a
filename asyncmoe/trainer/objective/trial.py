"""Load the user's own parts of an objective, and try each on small inputs before a run starts.

A trial finds a wrong signature, an exception, a wrong or infinite result, randomness, a changed input, and a loss or weight that depends on
how sequences are distributed over micro-batches and ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from asyncmoe import plugins
from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import UserError, together
from asyncmoe.trainer.objective import plugin
from asyncmoe.trainer.objective.plugin import Columns, Plugin, Plugins, Responses
from asyncmoe.trainer.objective.rows import PolicyRows, segments

log = logging.getLogger(__name__)
_VERSION = 7
_CLAMP = "clamp ratios, for example with asyncmoe.trainer.objective.exp"
_PURE = "a pure function: equal results for equal inputs, without random numbers or state"


def load(section: ObjectiveSection, cp: int = 1) -> Plugins:
    """Load and try the functions that a configuration names.

    Args:
        cp: context-parallel ranks; if there are several, functions of rows must also work on parts of sequences.

    Raises:
        ConfigError: a function cannot be imported or called, or failed its trial; names each such function, its file and line.
        UserError: raised by a function itself.
    """
    made: dict[str, Plugin | None] = {}
    refused: list[UserError] = []
    for key in section.own:
        try:
            made[key] = try_one(section, key, cp)
        except UserError as error:
            refused.append(error)
    if refused:
        raise together(refused)
    return Plugins(made.get(plugin.ADVANTAGE), made.get(plugin.LOSS), made.get(plugin.WEIGHT))


def try_one(section: ObjectiveSection, key: str, cp: int = 1) -> Plugin:
    """Load and try the function that a key of the configuration names. Arguments and errors as of `load`."""
    target, options = section.own[key]
    log.info("trying %s %s", key, target)
    found = Plugin(key, target, plugins.load_function(target, key, forms=plugins.FORM), options or {})
    try:
        with plugins.guarded(plugins.CALL_S):
            return try_advantage(found) if key == plugin.ADVANTAGE else try_rows(found, cp)
    except plugins.Failed as failed:
        raise found.refused(str(failed), "a result; it must not raise an exception, end the process or wait") from failed


def try_advantage(tried: Plugin) -> Plugin:
    """Try an advantage estimator on groups of different sizes, lengths and rewards. Return it.

    Raises:
        ConfigError: it failed.
    """
    batch = _responses()
    value, metrics = tried.of_responses(batch)
    again, metrics_again = tried.of_responses(_responses())
    if not np.array_equal(value, again) or metrics != metrics_again:
        raise tried.refused("different advantages for equal responses", _PURE)
    return tried


def try_rows(tried: Plugin, cp: int = 1) -> Plugin:
    """Try a loss or weight on packed sequences, on each of them alone, and on a micro-batch without any; with several context-parallel
    ranks also on parts of them. Return it with its metrics' names.

    Raises:
        ConfigError: it failed.
    """
    every, loss = (0, 1, 2), tried.key == plugin.LOSS
    rows = _rows(every, loss)
    value, metrics = tried.of_rows(rows)
    tried = replace(tried, metrics=tuple(sorted(metrics)))
    for name, tensor in _rows(every, loss).tensors().items():
        if not torch.equal(tensor, rows.tensors()[name]):
            raise tried.refused(f"a changed rows.{name}", "rows as they were", "compute out of place")
    tried.measure(rows, value, metrics)
    wrong = rows.mask & (~value.isfinite() | (value < (-torch.inf if loss else 0.0)))
    if wrong.any():
        at = int(wrong.nonzero()[0])
        said = ", ".join(
            f"{name} {float(getattr(rows, name)[at].detach()):g}" for name in ("logprobs", "proximal", "behaviour", "advantages")
        )
        expected = "finite numbers" if loss else "finite numbers, none negative"
        raise tried.refused(f"{float(value[at].detach()):g} for a token with {said}", expected, _CLAMP)
    for name, metric in metrics.items():
        if not torch.where(rows.mask, metric, 0).isfinite().all():
            raise tried.refused(f"the metric {name!r} that is not finite for a sampled token", "finite numbers", _CLAMP)
    if not torch.equal(*(torch.where(rows.mask, one, 0) for one in (value, tried.of_rows(_rows(every, loss))[0]))):
        raise tried.refused("different results for equal rows", _PURE)
    for alone in ((0,), (1,), (2,), ()):
        few = _rows(alone, loss)
        own, reported = tried.of_rows(few)
        tried.measure(few, own, reported)
        whole = torch.cat([value[rows.segments == i] for i in (*alone, -1)])
        if not _close(own, whole, few.mask):
            got = "other values for a sequence alone than beside others"
            raise tried.refused(got, "values that depend on the row's own sequence only; micro-batches and ranks divide a step in any way")
        _check_gradient(tried, few, own)
    _check_gradient(tried, rows, value)
    if cp > 1:
        _try_parts(tried, rows, value)
    return tried


def _try_parts(tried: Plugin, rows: PolicyRows, value: torch.Tensor) -> None:
    """Compare the values of rows in two parts with those of whole sequences: once with alternate rows in the two parts, once with all
    sampled rows in one part.

    Args:
        value: [T]; the function's values for `rows`, three whole sequences.

    Raises:
        ConfigError: they differ, or the function sums over sequences more often for one part than for another, so that a rank would be left
            waiting.
    """
    wholes: list[torch.Tensor] = []

    def recorded(total: torch.Tensor) -> torch.Tensor:
        wholes.append(total.detach())
        return total

    tried.of_rows(replace(rows, over_ranks=recorded))
    every_other = torch.arange(len(rows.mask)) % 2 == 0
    for part in (every_other, ~every_other, rows.mask, ~rows.mask):
        calls = itertools.count()

        def added_up(total: torch.Tensor, calls: Iterator[int] = calls) -> torch.Tensor:
            call = next(calls)
            return wholes[call] if call < len(wholes) else total

        held = {name: tensor.detach()[part].requires_grad_(tensor.requires_grad) for name, tensor in rows.tensors().items()}
        few = replace(rows, **held, over_ranks=added_up)  # type: ignore[arg-type]
        own = tried.of_rows(few)[0]
        if next(calls) != len(wholes):
            got = "rows.sum or rows.mean called more often for one part of some sequences than for the other"
            raise tried.refused(got, "equally many calls for any rows: ranks that hold parts of sequences add up each sum (trainer.cp)")
        if not _close(own, value[part], few.mask):
            expected = "the same values: only rows.sum and rows.mean see whole sequences, adding up the ranks' parts (trainer.cp)"
            raise tried.refused("different values if two ranks hold parts of a sequence", expected)


def _close(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> bool:
    return torch.allclose(torch.where(mask, one, 0.0), torch.where(mask, other, 0.0), rtol=1e-4, atol=1e-5)


def _check_gradient(tried: Plugin, rows: PolicyRows, value: torch.Tensor) -> None:
    if tried.key != plugin.LOSS:
        return
    gradient = None
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(torch.where(rows.mask, value, 0.0).sum(), rows.logprobs, allow_unused=True)
    if gradient is None:
        raise tried.refused("a loss without gradient", "a loss that depends on rows.logprobs")
    if not torch.where(rows.mask, gradient, 0.0).isfinite().all():
        raise tried.refused("a gradient that is not finite", "finite gradients", _CLAMP)


def _responses() -> Responses:
    """Return a batch of four groups: mixed, with equal rewards, of a single response, and with a response without sampled tokens. Every
    metric that is asked for equals the reward."""
    groups = (0, 0, 0, 0, 1, 1, 1, 2, 3, 3)
    sampled = (3, 9, 1, 5, 2, 4, 6, 7, 0, 8)
    made = Responses.of(
        rewards=(1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 1.0, -2.0, 0.0, 1e3),
        groups=groups,
        sampled=sampled,
        tokens=tuple(n + 4 for n in sampled),
        oldest_versions=tuple(_VERSION - group for group in groups),
        newest_versions=(_VERSION,) * len(groups),
    )
    return replace(made, metrics=Columns({}, made.rewards))


_LENGTHS = (6, 4, 5)
_SAMPLED = ((0, 0, 1, 1, 1, 0), (0, 1, 1, 0), (0, 0, 0, 0, 0))
_LOGPROBS = ((0, 0, -0.5, -1.25, -2.0, 0), (0, -0.75, -1.0, 0), (0,) * 5)
_PROXIMAL = ((0, 0, -0.75, -1.25, -1.0, 0), (0, -0.5, -101.0, 0), (0,) * 5)
_BEHAVIOUR = ((0, 0, -1.0, -0.25, -101.0, 0), (0, -0.25, -1.0, 0), (0,) * 5)
_ADVANTAGES = ((0, 0, 1.5, 1.5, 1.5, 0), (0, -0.5, -0.5, 0), (0,) * 5)
_VERSIONS = ((-1, -1, 5, 6, 7, -1), (-1, 7, 7, -1), (-1,) * 5)
"""Three sequences, the last without sampled tokens. Two ratios are e^100, as for tokens that were impossible for the engine."""


def _rows(chosen: tuple[int, ...], gradient: bool) -> PolicyRows:
    """Return a micro-batch of some of the sequences and one row of padding."""

    def flat(values: tuple[tuple[float, ...], ...], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
        return torch.tensor([*(value for i in chosen for value in values[i]), padding], dtype=dtype)

    mask = flat(_SAMPLED, torch.bool)
    lengths = [_LENGTHS[i] for i in chosen]
    return PolicyRows(
        mask=mask,
        weights=mask * 0.2,
        advantages=flat(_ADVANTAGES, torch.float32),
        behaviour=flat(_BEHAVIOUR, torch.float32),
        versions=flat(_VERSIONS, torch.int32, -1),
        pure=torch.zeros_like(mask),
        segments=segments(lengths, len(mask)),
        sequences=len(chosen),
        proximal=flat(_PROXIMAL, torch.float32),
        logprobs=flat(_LOGPROBS, torch.float32).requires_grad_(gradient),
        version=_VERSION,
    )
