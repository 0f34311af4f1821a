r"""Which trajectories may start and which may still be trained on: pure functions, and the count of all there are.

The capacity law is AReaL's (Fu et al., arXiv 2505.24298, section 5.1): with N trajectories started, B of them in a training step and
version i being served, another may start iff floor((N - 1) / B) <= i + eta. Here it is applied to whole groups, counts only
trajectories that may still be trained (a rejected or dropped one gives its place back), and counts versions from `base_version`,
where reinforcement learning began.

Theorem. Let every training step take the B trajectories with the oldest first-sampled token. If each trajectory is in the queue by
the time the step is leased that would train it, no trained token is more than eta versions old.

Proof. Sampling follows starting, so a trajectory whose oldest token has version v was started while some version <= v was
served. At the last such start the law held, so at most C(v) = (eta + v - base + 1) * B trajectories that may still be trained, those
already trained among them, have an oldest token <= v. Oldest first trains all of them before any newer one: the trajectory is one
of the first C(v) trained, so in a step that begins at trainer version <= base + C(v)/B - 1 = v + eta. []

A trajectory that finishes too late for this meets the consumption rule (`Admission.is_stale`), so the bound on what is trained holds
always; the law only makes drops rare. It needs versions to be published at least every eta + 1 steps: with eta + 1 steps' worth
started, no more start until the next version, which would then never come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asyncmoe.errors import InvariantBroken


@dataclass(frozen=True)
class Ledger:
    """Where every trajectory that was started is now; counts of trajectories, all since `base_version`.

    Invariant, checked at every change: started == running + queued + leased + trained + dropped + rejected, none negative.
    Each transition returns the new ledger and raises InvariantBroken when there are not `count` to move.
    """

    started: int = 0
    running: int = 0
    queued: int = 0
    leased: int = 0
    trained: int = 0
    dropped: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        if min(counts.values()) < 0 or 2 * self.started != sum(counts.values()):
            raise InvariantBroken(f"ledger: counts that are negative or do not add up: {counts}")

    @property
    def accepted(self) -> int:
        """Trajectories that arrived and are trained or may still be."""
        return self.queued + self.leased + self.trained

    def start(self, count: int) -> Ledger:
        """An engine begins to sample."""
        if count <= 0:
            raise InvariantBroken(f"ledger: started {count}")
        return replace(self, started=self.started + count, running=self.running + count)

    def accept(self, count: int) -> Ledger:
        """Complete and scored: running -> queued."""
        return self._move("running", "queued", count)

    def reject(self, count: int) -> Ledger:
        """Unusable: running -> rejected."""
        return self._move("running", "rejected", count)

    def drop(self, count: int) -> Ledger:
        """Refused by the consumption rule: queued -> dropped."""
        return self._move("queued", "dropped", count)

    def lease(self, count: int) -> Ledger:
        """Handed to the trainer: queued -> leased."""
        return self._move("queued", "leased", count)

    def release(self, count: int) -> Ledger:
        """Given back untrained: leased -> queued."""
        return self._move("leased", "queued", count)

    def train(self, count: int) -> Ledger:
        """Trained on: leased -> trained."""
        return self._move("leased", "trained", count)

    def _move(self, source: str, to: str, count: int) -> Ledger:
        if not 0 < count <= getattr(self, source):
            raise InvariantBroken(f"ledger: cannot move {count} from {source} to {to}: {self}")
        return replace(self, **{source: getattr(self, source) - count, to: getattr(self, to) + count})


@dataclass(frozen=True)
class Admission:
    """The staleness policy of a run.

    Attributes:
        batch: trajectories in a training step.
        eta: versions a trained token may be behind the trainer.
        base_version: version at which reinforcement learning began; nothing starts before it is served.
    """

    batch: int
    eta: int
    base_version: int = 0

    def capacity(self, version: int) -> int:
        """Trajectories that may have been started, and not rejected or dropped, while `version` is served."""
        return (self.eta + version - self.base_version + 1) * self.batch if version >= self.base_version else 0

    def may_start(self, ledger: Ledger, count: int, version: int) -> bool:
        """The capacity law for a group of `count`."""
        return ledger.accepted + ledger.running + count <= self.capacity(version)

    def oldest_allowed(self, version: int) -> int:
        """The oldest version a token may have in a step that begins at trainer version `version`."""
        return version - self.eta

    def is_stale(self, oldest_version: int, version: int) -> bool:
        """The consumption rule, for the oldest token of a group."""
        return oldest_version < self.oldest_allowed(version)
