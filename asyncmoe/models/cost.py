"""The cost of computing a sequence, from a model's sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from asyncmoe.models.latent import head_dims
from asyncmoe.models.shape import Shape


def attention_width(m: Shape) -> int:
    """Return the sequence length w at which causal attention takes as many operations as everything else: the cost of a sequence of s
    tokens grows as s (s + w), with w = 2 P / A of `operations`."""
    weights, attention = _sizes(m)
    return 2 * weights // attention


def operations(m: Shape, lengths: Sequence[int]) -> int:
    """Return the floating-point operations of a forward pass over sequences.

    A sequence of s tokens takes 2 P s operations for the P weights that a token is multiplied with (its experts only, the output layer
    once), and s^2 A for scores and weighted values of causal attention, where A is the number of heads times the dimensions of a key and a
    value together, summed over all layers. (Korthikanti et al., arXiv 2205.05198, appendix A, count the same with dense causal scores,
    twice as many.)
    """
    weights, attention = _sizes(m)
    return sum(length * (2 * weights + length * attention) for length in lengths)


def _sizes(m: Shape) -> tuple[int, int]:
    """Return P and A of `operations`."""
    matrices = sum(prod(shape) for shape in m.attention.shapes(m).values() if len(shape) == 2)
    dense, mixture = 3 * m.hidden * m.dense_width, 3 * m.hidden * (m.experts_per_token * m.expert_width + m.shared_width)
    without = len(m.dense_layers)
    weights = m.layers * matrices + without * dense + (m.layers - without) * (mixture + m.hidden * m.experts) + m.vocab * m.hidden
    return weights, m.layers * m.heads * sum(head_dims(m))
