"""Two closed-form laws: upper bounds on the speed-up of asynchronous over synchronous training.

Symbols, all for the *synchronous* step, which generates a batch, waits for its last response, and then trains on it:

- t_gen: seconds from the start of the first response to the end of the last. Towards the end few responses remain, and engines idle.
- t_train: seconds of training on the batch.
- g = t_gen / (t_gen + t_train): generation's share of the step.
- e: the time the same engines would need for the same tokens with all slots always occupied, divided by t_gen. The number of engines
  cancels, and 1 - e is the cost of stragglers.

Asynchronous engines never wait for a straggler: they need e t_gen for a batch's tokens, and training runs at the same time.

One pool of N GPUs. The baseline uses all GPUs for each phase in turn; asynchronous training permanently gives a share f to the engines and
the rest to the trainer. Work spread over f N instead of N GPUs takes 1/f as long, so a step takes max(e t_gen / f, t_train / (1 - f)). The
minimum, where both are equal, is e t_gen + t_train, at f = e t_gen / (e t_gen + t_train). Hence

    S_max = (t_gen + t_train) / (e t_gen + t_train) = 1 / (g e + 1 - g).

Two fixed pools. The baseline has the same engines and the same trainer, one of which is always idle. An asynchronous step takes as long as
the longer phase:

    S_pools = (t_gen + t_train) / max(e t_gen, t_train).

Assumptions: a batch fills the slots; max_staleness is large enough that the capacity law stops no engine and nothing is dropped (at least
the number of steps the longest response lasts, rounded up); scoring keeps up; weight sync costs nothing. `s_pools` can include the cost of
the sync.
"""

from __future__ import annotations


def s_max(g: float, e: float) -> float:
    """Return the largest speed-up of asynchrony on one pool of GPUs, over using the same GPUs for each phase in turn."""
    return 1 / (g * e + 1 - g)


def s_pools(t_gen: float, t_train: float, e: float, sync: float = 0.0, pause: float = 0.0) -> float:
    """Return the largest speed-up of asynchrony on two fixed pools, over using the same pools in turn.

    A weight sync takes `sync` seconds during which the engines generate, and `pause` seconds during which they pause. The synchronous step
    waits for both. The asynchronous step loses the pause from generation, and publishes one version at a time.
    """
    return (t_gen + t_train + sync + pause) / max(e * t_gen + pause, t_train, sync + pause)


def best_share(t_gen: float, t_train: float, e: float) -> float:
    """Return f, the share of one pool that should generate."""
    return e * t_gen / (e * t_gen + t_train)
