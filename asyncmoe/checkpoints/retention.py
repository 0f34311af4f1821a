"""Which checkpoints a run keeps, and the step at which its recorded window begins.

The recorded window is the steps that can be trained again: the run's log has the batches of all of them. It begins with a checkpoint, or,
in a run without a warm-up, with the model as it was loaded, at step 0. Deleting the checkpoint ends the steps up to the next one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from asyncmoe.config import Config


@dataclass(frozen=True)
class Retention:
    """What a run keeps.

    Attributes:
        newest: number of newest checkpoints, from which the run may resume.
        every: the first checkpoint at or after each multiple of this number of steps stays; 0: none.
        recorded: `log.keep`.
        warmup: steps of the warm-up, which are not recorded.
    """

    newest: int
    every: int = 0
    recorded: int | Literal["all"] | None = None
    warmup: int = 0

    @classmethod
    def of(cls, config: Config) -> Retention:
        """Return what a run of this configuration keeps."""
        return cls(config.trainer.keep_checkpoints, config.trainer.keep_every, config.log.keep, config.warmup.steps)

    def oldest(self, steps: Collection[int]) -> int:
        """Return the step of the oldest checkpoint from which the run may resume. `steps`: those of its checkpoints, at least one."""
        return sorted(steps)[-self.newest :][0]

    def starts(self, steps: Collection[int], since: int) -> list[int]:
        """Return the steps at which a recorded window may begin, ascending. `since`: first step from which all batches are recorded."""
        since = max(since, self.warmup)
        return sorted({step for step in steps if step >= since} | ({0} if since == 0 else set()))

    def begins(self, steps: Collection[int], since: int) -> int | None:
        """Return the step at which the recorded window begins; None: it has no checkpoint yet. Arguments as for `starts`."""
        starts, wanted = self.starts(steps, since), self.oldest(steps) if steps else 0
        if self.recorded is not None:
            wanted = 0 if self.recorded == "all" else min(wanted, max(steps, default=0) - self.recorded)
        return max((step for step in starts if step <= wanted), default=min(starts, default=None))

    def kept(self, steps: Collection[int], since: int = 0) -> set[int]:
        """Return the steps whose checkpoints stay.

        Besides the newest ones and those for multiples of `every`, this is the checkpoint at which the recorded window begins, and the
        first one in each `recorded` steps after it, with one of which the window will begin later; so the window is shorter than
        2 * `recorded` steps and the distance between two checkpoints. A checkpoint kept for a multiple stays kept, because later saves have
        higher steps.
        """
        begin, after = self.begins(steps, since), [step for step in steps if step >= self.warmup]
        later = _firsts(after, self.recorded, self.warmup) if isinstance(self.recorded, int) else set()
        recorded = {step for step in steps if step == begin} | {step for step in later if begin is not None and step > begin}
        return {*sorted(steps)[-self.newest :]} | _firsts(steps, self.every) | recorded


def _firsts(steps: Collection[int], every: int, base: int = 0) -> set[int]:
    """Return the first step at or after each multiple of `every`, counted from `base` and without `base` itself; none if `every` is 0."""
    first: dict[int, int] = {}
    for step in sorted(steps) if every else ():
        first.setdefault((step - base) // every, step)
    return {step for multiple, step in first.items() if multiple}
