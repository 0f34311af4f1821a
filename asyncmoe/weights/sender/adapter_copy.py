"""A rank's halves as engines use them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class AdapterCopy:
    """Copies of a rank's halves, with B multiplied by the adapter's scale; training continues while the copies are sent.

    Attributes:
        tensors: by the names of `live`; always the same memory.

    Args:
        live: the halves that are trained.
        scale: alpha / rank. Engines receive an adapter of scale 1 (`asyncmoe.models.lora.sglang.memory_layout`).
    """

    def __init__(self, live: Mapping[str, torch.Tensor], scale: float) -> None:
        self._live = list(live.items())
        self._scale = scale
        self.tensors = {name: torch.empty_like(value) for name, value in self._live}
        self._scaled = [value for name, value in self.tensors.items() if name.endswith("_b")]

    def take(self) -> None:
        """Copy the current halves."""
        torch._foreach_copy_(list(self.tensors.values()), [value for _, value in self._live])
        if self._scale != 1:
            torch._foreach_mul_(self._scaled, self._scale)
