"""What asynchrony can gain: two closed laws.

Symbols, all of the *synchronous* step, which generates a batch, waits for its last response, and then trains on it:

- t_gen: seconds from the first response's start to the last one's end. Towards the end few are left, and engines wait for them.
- t_train: seconds of training on the batch.
- g = t_gen / (t_gen + t_train): generation's share.
- e: the seconds in which the same engines would have generated the same tokens with every slot taken all the time, over t_gen. The
  number of engines cancels, and 1 - e is what stragglers cost.

Never waiting for a straggler, engines need e t_gen for a batch's tokens, and training goes on meanwhile.

One pool of N GPUs. The baseline uses all of them for either phase in turn; asynchronous training gives a share f to engines and the
rest to the trainer, for good. Work spread over f N instead of N takes 1/f as long, so a step takes max(e t_gen / f, t_train / (1 - f)),
least where both are equal: at f = e t_gen / (e t_gen + t_train), and then e t_gen + t_train. Hence

    S_max = (t_gen + t_train) / (e t_gen + t_train) = 1 / (g e + 1 - g).

Two fixed pools. The baseline has the same engines and the same trainer, one of them always idle. A step takes the longer of the two
phases:

    S_pools = (t_gen + t_train) / max(e t_gen, t_train).

Assumed: a batch that fills the slots, eta large enough that the capacity law stops no engine and nothing is dropped (at least
the steps that the longest response lasts, rounded up), scoring that keeps up, and a weight sync that costs nothing.
`s_pools` takes the cost of the sync along where there is one.
"""

from __future__ import annotations


def share(t_gen: float, t_train: float) -> float:
    """g: generation's share of the synchronous step."""
    return t_gen / (t_gen + t_train)


def s_max(g: float, e: float) -> float:
    """Most that asynchrony gains on one pool of hardware, against the same hardware used in turns."""
    return 1 / (g * e + 1 - g)


def s_pools(t_gen: float, t_train: float, e: float, sync: float = 0.0, pause: float = 0.0) -> float:
    """Most that asynchrony gains on two fixed pools, against the same pools used in turns.

    With a weight sync, of which `sync` seconds pass while the engines go on and `pause` while they stand still: the synchronous step waits
    for both, the asynchronous one generates for its pause less, and publishes one version at a time.
    """
    return (t_gen + t_train + sync + pause) / max(e * t_gen + pause, t_train, sync + pause)


def best_share(t_gen: float, t_train: float, e: float) -> float:
    """f: share of one pool that should generate."""
    return e * t_gen / (e * t_gen + t_train)
