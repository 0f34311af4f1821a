"""The data recorded for a sampled token in addition to its log-probability and version."""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.trajectory.routes import Routing


@dataclass(frozen=True)
class Recording:
    """The data that engines must return and that a sampled trajectory must carry to be trained on.

    Attributes:
        routing: the model's routing, if the experts of every token are recorded; None: they are not.
        masks: the ids from which every token was sampled are recorded, and its log-probability is over these ids; if false, it is over
            the whole vocabulary.
        vocabulary: size of the vocabulary; None: token ids are not checked.
        rewards: steps have rewards.
        teacher: a teacher supplies log-probabilities.
    """

    routing: Routing | None = None
    masks: bool = False
    vocabulary: int | None = None
    rewards: bool = False
    teacher: bool = False


NOTHING = Recording()
"""No additional data."""
