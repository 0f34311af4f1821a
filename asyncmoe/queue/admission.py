r"""Which trajectories may start and which may still be trained on: pure functions, and a ledger of all trajectories.

The capacity law is AReaL's (Fu et al., arXiv 2505.24298, section 5.1): with N trajectories started, B of them in a training step and
version i being served, another may start iff floor((N - 1) / B) <= i + eta, where eta is `queue.staleness.max_staleness`. Here the law
applies to whole groups, counts only trajectories that were or may still be trained (a rejected or dropped one frees its capacity), and
counts versions from `base_version`, where reinforcement learning began.

Theorem. Let every training step take the B trajectories with the oldest first-sampled token. If each trajectory is in the queue when the
step that would train it is leased, no trained token is more than eta versions old.

Proof. Sampling follows starting, so a trajectory whose oldest token has version v was started while some version <= v was
served. At the last such start the law held, so of the trajectories that were or may still be trained, at most
C(v) = (eta + v - base + 1) * B have an oldest token <= v. Oldest-first training takes all of them before any newer one: the trajectory is
among the first C(v) trained, so in a step that begins at trainer version <= base + C(v)/B - 1 = v + eta. []

A trajectory that finishes too late for the theorem faces the consumption rule, so the age of trained tokens is always bounded; because
of the law, the rule is rarely needed. Lemma: under every rule, no trained token is more than `Admission.age_bound` versions old: eta for
drop and requeue, `drop_above` for downweight. Proof. When a step is leased at trainer version i, every queued group with a token older
than i - age_bound leaves the queue (`oldest_allowed`); only queued groups are leased; the step trains at version i. []

To the law, a requeued group is a new group: its capacity was returned, and its age counts from the versions that sample it again.
The law needs a new version at least every eta + 1 steps: once the trajectories of eta + 1 steps have started, no more start until the next
version is served. A version that needed more trajectories than these would never come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asyncmoe.config.queue import StalenessRule
from asyncmoe.errors import InvariantBroken


@dataclass(frozen=True)
class Ledger:
    """Counts of all started trajectories by their current state, since `base_version`; with several agents, counts of episodes.

    Invariant, checked at every change: started == running + queued + leased + trained + dropped + rejected + requeued + skipped,
    none negative. The last five are final, so every trajectory ends in exactly one of them; only the loss of the trainer's newest steps
    takes trajectories out of trained and skipped. Under the law, running, queued, leased and trained trajectories use capacity, and so do
    skipped ones, whose step is over although the trainer left them untrained.

    Each transition returns the new ledger. It raises InvariantBroken if fewer than `count` trajectories are in the source state.
    """

    started: int = 0
    running: int = 0
    queued: int = 0
    leased: int = 0
    trained: int = 0
    dropped: int = 0
    rejected: int = 0
    requeued: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        if min(counts.values()) < 0 or 2 * self.started != sum(counts.values()):
            raise InvariantBroken(f"ledger: negative or inconsistent counts: {counts}")

    @property
    def accepted(self) -> int:
        """Trajectories that arrived and were trained or may still be trained."""
        return self.queued + self.leased + self.trained

    def start(self, count: int) -> Ledger:
        """Start sampling: started and running grow."""
        if count <= 0:
            raise InvariantBroken(f"ledger: got {count} to start, expected at least 1")
        return replace(self, started=self.started + count, running=self.running + count)

    def accept(self, count: int) -> Ledger:
        """Accept complete and scored trajectories: running -> queued."""
        return self._move("running", "queued", count)

    def reject(self, count: int) -> Ledger:
        """Reject unusable trajectories: running -> rejected."""
        return self._move("running", "rejected", count)

    def discard(self, count: int) -> Ledger:
        """Discard complete trajectories without a learning signal: running -> dropped."""
        return self._move("running", "dropped", count)

    def drop(self, count: int) -> Ledger:
        """Drop trajectories that the consumption rule refuses: queued -> dropped."""
        return self._move("queued", "dropped", count)

    def requeue(self, count: int) -> Ledger:
        """Requeue trajectories that the consumption rule refuses, whose prompts start again: queued -> requeued."""
        return self._move("queued", "requeued", count)

    def lease(self, count: int) -> Ledger:
        """Lease trajectories to the trainer: queued -> leased."""
        return self._move("queued", "leased", count)

    def skip(self, count: int) -> Ledger:
        """Skip trajectories that their step left untrained: leased -> skipped."""
        return self._move("leased", "skipped", count)

    def train(self, count: int) -> Ledger:
        """Count trajectories as trained: leased -> trained."""
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
        max_staleness: number of versions that a trained token may lag behind the trainer under the capacity law.
        base_version: version at which reinforcement learning began; nothing starts before it is served.
        rule: what happens to a group whose oldest token is more than max_staleness versions old.
        downweight: with rule downweight, the factor on a group's weight for each version beyond max_staleness.
        drop_above: with rule downweight, the age in versions above which a group is dropped, > max_staleness; None: another rule.
    """

    batch: int
    max_staleness: int
    base_version: int = 0
    rule: StalenessRule = "drop"
    downweight: float = 1.0
    drop_above: int | None = None

    @property
    def age_bound(self) -> int:
        """Hard bound on the number of versions that a trained token may lag behind the trainer."""
        return self.max_staleness if self.drop_above is None else self.drop_above

    def capacity(self, version: int) -> int:
        """Number of trajectories that may have started while `version` is served, not counting rejected and dropped ones."""
        return (self.max_staleness + version - self.base_version + 1) * self.batch if version >= self.base_version else 0

    def may_start(self, ledger: Ledger, count: int, version: int) -> bool:
        """Whether the capacity law admits `count` more trajectories."""
        return ledger.accepted + ledger.skipped + ledger.running + count <= self.capacity(version)

    def oldest_allowed(self, version: int) -> int:
        """Oldest version that a token may have in a step that begins at trainer version `version`."""
        return version - self.age_bound

    def is_stale(self, oldest_version: int, version: int) -> bool:
        """Whether a group with this oldest token is too old for a step that begins at trainer version `version`."""
        return oldest_version < self.oldest_allowed(version)

    def weight(self, oldest_version: int, version: int) -> float:
        """Weight of a group with this oldest token: downweight ** (versions beyond max_staleness), 1 up to max_staleness.

        The whole group has one weight, so advantages that sum to zero still do.
        """
        return float(self.downweight ** max(0, version - oldest_version - self.max_staleness)) if self.rule == "downweight" else 1.0
