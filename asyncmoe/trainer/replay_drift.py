"""How far a trainer that trains a batch again is from the one that trained it first. Pure.

Training again is not exact to the bit on most machines, so the weights of step k are others than those with which engines sampled
version k. The engines recorded the log-probabilities of then. On trajectories that version k alone sampled, the difference from the
trainer's at step k is how far the weights have drifted, beside what engine and trainer differ by anyway (`verify.logprobs_every`). A
checkpoint that is not the run's, or an optimizer state that was not restored, shows here before the batch is trained.
"""

from __future__ import annotations

from asyncmoe.errors import Disagreement
from asyncmoe.trainer.logprob_mismatch import Agreement


def drift(found: Agreement, step: int, most: float) -> float | None:
    """Return the mean |difference| in nats a token; None if no trajectory of the batch is of version `step` alone.

    Args:
        found: of engines and trainer, over all ranks.
        most: `verify.max_replay_drift`.

    Raises:
        Disagreement: it is above `most`, or not a number.
    """
    if not found.tokens:
        return None
    if not found.mean <= most:
        raise Disagreement(
            f"step {step} is trained again, and its log-probabilities differ by {found.mean:.3e} a token from those of the first time, "
            f"over {found.tokens} tokens; verify.max_replay_drift is {most:g}. Nothing was trained on the batch. The checkpoint and the "
            "journal do not belong together, or the checkpoint was not restored as a whole"
        )
    return found.mean
