"""Which neurons of each expert start anew, and from what they are drawn.

Source: Drop-Upcycling (arXiv 2502.19261, section 3.2). A neuron of a gated MLP is a row of gate, the same row of up and the same column of
down; the drawn weights have the mean and the standard deviation of the matrix that they are part of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Fresh:
    """`share`: part of an expert's neurons that start anew, 0 to 1. `seed`: of the choice and of the weights."""

    share: float
    seed: int

    def neurons(self, layer: int, expert: int, width: int) -> np.ndarray:
        """Return the neurons of an expert that start anew, int64[round(share * width)], ascending."""
        chosen = np.random.default_rng((self.seed, layer, expert)).permutation(width)
        return np.sort(chosen[: round(self.share * width)])

    def drawn(self, tensor: torch.Tensor, layer: int, expert: int, part: str) -> torch.Tensor:
        """Return an expert's `part` ("gate", "up" or "down") with its new neurons drawn.

        Args:
            tensor: [width, hidden] for gate and up, [hidden, width] for down.
        """
        along = 1 if part == "down" else 0
        neurons = torch.from_numpy(self.neurons(layer, expert, tensor.shape[along]))
        wide, found = tensor.float(), tensor.clone()
        shape = (len(neurons), tensor.shape[1 - along])
        values = np.random.default_rng((self.seed, layer, expert, _PARTS.index(part))).standard_normal(shape, np.float32)
        new = (torch.from_numpy(values) * wide.std() + wide.mean()).to(tensor.dtype)
        found.index_copy_(along, neurons, new.T.contiguous() if along else new)
        return found
