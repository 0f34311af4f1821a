"""The cost of computing a sequence, from a model's sizes."""

from __future__ import annotations

from math import prod

from asyncmoe.models.latent import head_dims
from asyncmoe.models.shape import Shape


def attention_width(m: Shape) -> int:
    """Return the sequence length at which causal attention takes as many operations as everything else.

    A sequence of s tokens takes 2 P s operations for the P weights that a token is multiplied with (its experts only, the output layer
    once), and s^2 A for scores and weighted values of causal attention, where A is the number of heads times the dimensions of a key and a
    value together, summed over all layers. So its cost grows as s (s + w) with w = 2 P / A. (Korthikanti et al., arXiv 2205.05198, appendix
    A, count the same with dense causal scores, twice as many.)
    """
    matrices = sum(prod(shape) for shape in m.attention.shapes(m).values() if len(shape) == 2)
    dense, mixture = 3 * m.hidden * m.dense_width, 3 * m.hidden * (m.experts_per_token * m.expert_width + m.shared_width)
    without = len(m.dense_layers)
    weights = m.layers * matrices + without * dense + (m.layers - without) * (mixture + m.hidden * m.experts) + m.vocab * m.hidden
    return 2 * weights // (m.layers * m.heads * sum(head_dims(m)))
