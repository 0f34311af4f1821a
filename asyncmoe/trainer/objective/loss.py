"""The loss of a micro-batch, assembled from its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from asyncmoe.config.objective import ObjectiveSection
from asyncmoe.errors import InvariantBroken
from asyncmoe.trainer.objective.aggregation import kept_weights
from asyncmoe.trainer.objective.centring import SUMS, centred
from asyncmoe.trainer.objective.correction import Fates, correct
from asyncmoe.trainer.objective.metrics import measure
from asyncmoe.trainer.objective.plugin import NO_PLUGINS, Plugins
from asyncmoe.trainer.objective.rows import PolicyRows, Rows, Sums, clamped
from asyncmoe.trainer.objective.surrogate import penalty, proximal_logprobs, ratio, surrogate


def policy_loss(
    logprobs: torch.Tensor,
    rows: Rows,
    section: ObjectiveSection,
    version: int,
    *,
    progress: float = 0.0,
    unmasked: torch.Tensor | None = None,
    top: tuple[torch.Tensor, torch.Tensor] | None = None,
    plugins: Plugins = NO_PLUGINS,
    observe: Callable[[Fates], None] | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Compute a micro-batch's share of the configured objective.

        loss = sum over sampled rows of  weight * ([kept] * correction * surrogate(ratio, A) + coefficient * KL(pi || pi_ref))

    from `kept_weights`, `correct`, `surrogate`, `ratio` and `penalty`; score centring adds weight * A * `centred` for each row that is kept
    or that only the token band rejects. A plug-in loss takes the place of the surrogate, a plug-in weight that of the correction; a row
    with a plug-in weight of 0 is not kept. The caller must multiply the loss and its gradient by `scale` of the step's sums, so that
    rejected rows leave the denominator; nothing else depends on other micro-batches.

    The loss and its gradient are finite for all log-probabilities, even infinite ones; a NaN in a sampled row makes the loss NaN.

    Args:
        logprobs: float32[T] with gradient: log pi of each row's token, over the support it was sampled from.
        rows: the micro-batch's T rows.
        section: the configured objective.
        version: weight version before the batch's first update.
        progress: share of the batch's updates already made; only `loglinear` uses it.
        unmasked: float32[T] with gradient: log pi over the whole vocabulary, like `rows.reference`; None: use `logprobs`.
        top: float32[T, K] with gradient, and float32[T, K]: the arguments of `centred`. None: no row has any.
        plugins: the user's own parts that `section` names.
        observe: called with the rows' fates.

    Returns:
        The loss, a float32 scalar, and the sums that `metrics.SUMS` and the plug-ins declare.

    Raises:
        ConfigError: a plug-in fails.
        InvariantBroken: `rows` lacks the reference or proximal log-probabilities that `section` needs.
    """
    if section.kl.coefficient and rows.reference is None:
        raise InvariantBroken("objective.kl.coefficient is above 0, but the rows have no log-probabilities of a reference policy")
    rows, new = rows.clamped(), clamped(logprobs, rows.mask)
    compared = new if unmasked is None else clamped(unmasked, rows.mask)
    old = proximal_logprobs(new, rows, section, version, progress)
    seen = PolicyRows(**vars(rows) | {"logprobs": new, "proximal": old, "version": version})
    added: Sums = {}
    if plugins.loss is None:
        value, cut = surrogate(ratio(new, old, rows, section.ratio), new, old, rows.advantages, section)
    else:
        value, reported = plugins.loss.of_rows(seen)
        cut, added = torch.zeros_like(rows.mask), plugins.loss.measure(seen, value, reported)
    with torch.no_grad():
        own = None
        if plugins.weight is not None:
            own, reported = plugins.weight.of_rows(replace(seen, logprobs=new.detach()))
            added = added | plugins.weight.measure(seen, own, reported)
        fates = correct(new, old, rows, section, version, cut, own)
        weights = kept_weights(rows, fates.kept, section.aggregation, section.correction.denominator)
        if observe is not None:
            observe(fates)
        sums = measure(fates, compared, rows, weights, version) | added
    value = torch.where(fates.kept, value * fates.weight, 0.0)
    if section.score_centering:
        sums |= dict.fromkeys(SUMS, torch.zeros((), dtype=torch.float64))
    if top is not None:
        centre, *found = centred(*top, section.correction)
        others = fates.rejected[1:].any(dim=0)  # all rules but the token band, which `centred` includes
        value = value + torch.where(rows.mask & ~others, rows.advantages * centre, 0.0)
        sums |= {name: torch.where(rows.mask, one, 0.0).double().sum() for name, one in zip(SUMS, found, strict=True)}
    loss = (value * weights).sum()
    if rows.reference is not None and section.kl.coefficient:
        divergence = penalty(compared, rows.reference, new - rows.behaviour, section.kl.estimator)
        loss = loss + section.kl.coefficient * (divergence * weights).sum()
    return loss, sums
