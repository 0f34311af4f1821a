"""The trainer: leases a batch, trains on it, counts the ages of its tokens; sometimes dies and returns."""

from __future__ import annotations

from collections.abc import Callable

from asyncmoe.errors import InvariantBroken
from asyncmoe.simulate.actors.queue import QueuedGroup, SimulatedQueue
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.state import RunState


class SimulatedTrainer:
    """The training pool.

    Args:
        stepped: called after every step.
        dropped: called soon after stale groups were dropped, which leaves places and space.

    Attributes:
        settling: set while the trainer has finished a step and the version of the step before is not served yet; it leases nothing then.
    """

    def __init__(self, state: RunState, queue: SimulatedQueue, stepped: Callable[[], None], dropped: Callable[[], None]) -> None:
        self._state, self._clock, self._queue = state, state.clock, queue
        self._stepped, self._dropped = stepped, dropped
        self._lease: list[QueuedGroup] | None = None
        self._up, self.settling = True, False
        self._free_since = 0.0

    def try_lease(self) -> None:
        """Begin the next step, if the trainer is free and the queue has a batch."""
        state, plant = self._state, self._state.plant
        if self._lease is not None or not self._up or self.settling or state.steps >= plant.steps:
            return
        if self._queue.drop_stale():
            # Deferred, because freed places may trigger a lease, and a lease is being decided here.
            self._clock.after(0.0, self._dropped)
        self._lease = lease = self._queue.lease()
        if lease is None:
            return
        lengths = _lengths(plant, lease)
        fetch = plant.fetch_s(sum(lengths))
        state.trace.now.waiting += self._clock.now - self._free_since + fetch
        seconds = state.varied(plant.train_s(lengths))
        if state.rng.random() < plant.failures.trainer:
            self._clock.after(fetch + seconds * state.rng.random(), lambda: self._die(lease))
        else:
            self._clock.after(fetch + seconds, lambda: self._finish(lease, seconds))

    def _finish(self, lease: list[QueuedGroup], seconds: float) -> None:
        state, self._lease = self._state, None
        self._count_ages(lease)
        state.ledger = state.ledger.train(state.plant.batch)
        state.trace.now.training += seconds
        state.steps += 1
        self._free_since = self._clock.now
        self._stepped()

    def _count_ages(self, lease: list[QueuedGroup]) -> None:
        trace, step, bound = self._state.trace, self._state.steps, self._state.law.age_bound
        for _, _, group in lease:
            age = step - int(group.oldest)
            if age > bound:
                raise InvariantBroken(f"simulation: step {step} trained a token of age {age}, the law allows {bound}")
            trace.oldest[age] += 1
            for version, tokens in group.tokens.items():
                trace.ages[step - version] += round(tokens)
            trace.now.trained_tokens += sum(turn for episode in group.episodes for turn in episode[0])
            group.end()

    def _die(self, lease: list[QueuedGroup]) -> None:
        self._queue.release(lease)
        self._lease, self._up = None, False
        self._free_since = self._clock.now
        self._clock.after(self._state.plant.failures.trainer_restart_s, self._return)

    def _return(self) -> None:
        self._up = True
        self.try_lease()


def _lengths(plant: Plant, lease: list[QueuedGroup]) -> list[int]:
    """Tokens of each trajectory of a batch; none if nothing depends on them."""
    if not plant.trainer.token_s and not plant.trainer.fetch_bytes_per_s:
        return []
    episodes = (turns for _, _, group in lease for turns, _ in group.episodes)
    return [plant.prompt_tokens + sum(turns) + plant.tool_tokens * (len(turns) - 1) for turns in episodes]
