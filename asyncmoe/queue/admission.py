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

Spare responses (over-sampling) take no place: of a group started with more than it needs, only as many as have places are ever queued,
so the law counts places, and the proof above is about those.

When the law lets single trajectories start (`asyncmoe.queue.start_order`), places are handed to one group after the other, and a member
that is
started over takes back its own place before anything else starts. B and the group size divide C(v), so the places handed out while some
version <= v was served are those of at most C(v) / size groups: the proof holds for groups ordered by their oldest token.

A trajectory that finishes too late for this meets the consumption rule, so a bound on what is trained holds always; the law only makes
it rare that the rule is needed. Lemma: whatever the rule, no trained token is more than `Admission.max_age` versions old: eta for drop and
requeue, the configured age for downweight. Proof. At the moment a step is leased at trainer version i, every queued group with a token
older than i - max_age leaves the queue (`oldest_allowed`); only queued groups are leased; the step trains at version i. A lease given back
is queued again, and meets the rule again. []

Started again, a requeued group is a new one to the law: its places were given back, and its age counts from the versions that sample it
anew. The law needs versions to be published at least every eta + 1 steps: with eta + 1 steps' worth
started, no more start until the next version, which would then never come.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from asyncmoe.config.generation import StalenessRule
from asyncmoe.errors import ConfigError, InvariantBroken


@dataclass(frozen=True)
class Ledger:
    """Where everything that was started is now; counts of trajectories (episodes, where several agents speak), all since `base_version`.

    Invariant, checked at every change: started == running + spare + queued + leased + trained + dropped + rejected + requeued, none
    negative. The last four are final, so every trajectory ends in exactly one of them. Running ones have a place under the capacity law;
    spare ones run beside a group that needs no more than its places, and will never be queued. Which of a group's responses are the spare
    ones is not known before it is complete; only how many.

    Each transition returns the new ledger and raises InvariantBroken when there are not `count` to move.
    """

    started: int = 0
    running: int = 0
    spare: int = 0
    queued: int = 0
    leased: int = 0
    trained: int = 0
    dropped: int = 0
    rejected: int = 0
    requeued: int = 0

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

    def start_spare(self, count: int) -> Ledger:
        """An engine begins to sample responses beyond what their group needs."""
        return replace(self.start(count), running=self.running, spare=self.spare + count)

    def reject(self, count: int) -> Ledger:
        """Unusable: running -> rejected."""
        return self._move("running", "rejected", count)

    def reject_spare(self, count: int) -> Ledger:
        """Unusable, but others make the group: spare -> rejected."""
        return self._move("spare", "rejected", count)

    def discard(self, count: int) -> Ledger:
        """Complete, but with nothing to learn from: running -> dropped."""
        return self._move("running", "dropped", count)

    def discard_spare(self, count: int) -> Ledger:
        """Cut short because others made the group: spare -> dropped."""
        return self._move("spare", "dropped", count)

    def drop(self, count: int) -> Ledger:
        """Refused by the consumption rule: queued -> dropped."""
        return self._move("queued", "dropped", count)

    def requeue(self, count: int) -> Ledger:
        """Refused by the consumption rule, and their prompts are to be started again: queued -> requeued."""
        return self._move("queued", "requeued", count)

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
        eta: versions a trained token may be behind the trainer, as far as the capacity law goes.
        base_version: version at which reinforcement learning began; nothing starts before it is served.
        rule: what becomes of a group whose oldest token is older than eta.
        downweight: rule downweight: what a group weighs is multiplied by this for each version beyond eta.
        hard_limit: rule downweight: a group with an older token is dropped after all.

    Raises:
        ConfigError: downweight without a `hard_limit` above eta, or another rule with one.
    """

    batch: int
    eta: int
    base_version: int = 0
    rule: StalenessRule = "drop"
    downweight: float = 1.0
    hard_limit: int | None = None

    def __post_init__(self) -> None:
        if self.rule == "downweight" and (self.hard_limit is None or self.hard_limit <= self.eta):
            raise ConfigError("queue.staleness.max_age", got=self.hard_limit, expected=f"more than eta = {self.eta} with rule downweight")
        if self.rule != "downweight" and self.hard_limit is not None:
            raise ConfigError("queue.staleness.max_age", got=self.hard_limit, expected=f"nothing with rule {self.rule}: its bound is eta")
        if not 0 < self.downweight <= 1:
            raise ConfigError("queue.staleness.downweight", got=self.downweight, expected="more than 0, at most 1")

    @property
    def max_age(self) -> int:
        """Versions that a trained token may be behind the trainer: never more, whatever happens."""
        return self.eta if self.hard_limit is None else self.hard_limit

    def capacity(self, version: int) -> int:
        """Trajectories that may have been started, and not rejected or dropped, while `version` is served."""
        return (self.eta + version - self.base_version + 1) * self.batch if version >= self.base_version else 0

    def may_start(self, ledger: Ledger, count: int, version: int) -> bool:
        """The capacity law for `count` more, spare ones not among them."""
        return ledger.accepted + ledger.running + count <= self.capacity(version)

    def oldest_allowed(self, version: int) -> int:
        """The oldest version a token may have in a step that begins at trainer version `version`."""
        return version - self.max_age

    def is_stale(self, oldest_version: int, version: int) -> bool:
        """Whether a group with this oldest token must not be trained in a step that begins at trainer version `version`."""
        return oldest_version < self.oldest_allowed(version)

    def weight(self, oldest_version: int, version: int) -> float:
        """What a group with this oldest token counts for: downweight ** (versions beyond eta), 1 up to eta.

        One weight for the whole group, so that its advantages still add up to what they did.
        """
        return float(self.downweight ** max(0, version - oldest_version - self.eta)) if self.rule == "downweight" else 1.0
