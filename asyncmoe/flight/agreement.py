"""Checks that engines sampled with the weight version that they recorded.

Under that version's weights the trainer's log-probabilities equal the engine's up to rounding. An engine that still served the version
before agrees with that one instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from asyncmoe.trajectory import Trajectory

_LEAST = 1e-3
"""Smallest difference in nats that counts."""
_ENOUGH = 8
"""Least tokens of a part in which older keys and values may have had a share: fewer may come close to either version by chance."""


@dataclass(frozen=True)
class StaleTokens:
    """Tokens that fit the version before the one they were recorded with.

    Attributes:
        position: of the trajectory, in the batch.
        claimed: the version recorded; `claimed - 1` fits.
        difference, before: the largest difference in nats between the engine's log-probabilities and the trainer's, with the weights of the
            version claimed, and with those of the one before.
        tokens: the first of these tokens, and the one after the last.
    """

    step: int
    position: int
    claimed: int
    difference: float
    before: float
    tokens: tuple[int, int]


def stale(step: int, trajectories: Mapping[int, Trajectory], trainer: Mapping[int, Mapping[int, np.ndarray]]) -> list[StaleTokens]:
    """Return the stale parts of a batch; a part is a trajectory's tokens of one version.

    A part is stale if it agrees with the version before up to twice the usual rounding, and differs from its own by more than six times
    that and more than 1e-3 nats; both are the largest over its tokens. The usual rounding is the 90th percentile over the parts all of
    whose keys and values are known to come from their version (else over all parts), each part with the version that fits it better: it
    stays small even if every part is stale.

    Args:
        trajectories: by position in the batch.
        trainer: by version and position: float32[T], the trainer's log-probabilities with this version's weights, at the temperature of
            sampling and with the recorded experts and masks. Tokens are checked if it has their trajectory under their version and
            under the one before.
    """
    parts: list[StaleTokens] = []
    rounding: dict[bool, list[float]] = {True: [], False: []}
    for position, one in trajectories.items():
        for version in np.unique(one.versions[one.loss_mask]).tolist():
            at, exact = np.flatnonzero(one.versions == version), version == one.prefix_version
            under = [trainer.get(weights, {}).get(position) for weights in (version, version - 1)]
            if not (exact or len(at) >= _ENOUGH) or any(values is None for values in under):
                continue
            own, before = (float(np.abs(one.logprobs[at] - values[at]).max()) for values in under if values is not None)
            parts.append(StaleTokens(step, position, version, own, before, (int(at[0]), int(at[-1]) + 1)))
            rounding[exact].append(min(own, before))
    usual = np.quantile(rounding[True] or rounding[False] or [0.0], 0.9)
    return [one for one in parts if one.before <= 2 * usual and one.difference > max(_LEAST, 6 * usual)]
