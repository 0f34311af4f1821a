"""What is recorded of a sampled token besides its log-probability and its version."""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.record.routes import Routing


@dataclass(frozen=True)
class Recording:
    """What engines are asked for, and what a sampled trajectory must carry to be trained on.

    Attributes:
        routing: of the model, where the experts of every token are kept; None: they are not.
        masks: the ids every token was sampled from are kept, and its log-probability is over those; otherwise over the vocabulary.
        vocabulary: size of it; None: token ids are not checked.
        rewards: steps are rewarded.
        teacher: a teacher is asked for its log-probabilities.
    """

    routing: Routing | None = None
    masks: bool = False
    vocabulary: int | None = None
    rewards: bool = False
    teacher: bool = False


NOTHING = Recording()
"""Nothing besides."""
