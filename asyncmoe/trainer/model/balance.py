"""Load balancing by router selection biases, trained without gradients: a step of fixed size towards balance.

Source: Wang et al., "Auxiliary-Loss-Free Load Balancing" (arXiv 2408.15664, algorithm 1); DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
Megatron implements the rule too, in `finalize_model_grads`, but counts padding there, and moves biases before a NaN loss is detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from asyncmoe.platform import collectives
from asyncmoe.trainer.data.batch import MicroBatch


class Balance:
    """Trains the selection biases of this rank's routers.

    Args:
        chunks: the model chunks of this pipeline stage; their routers have selection biases.
        layers: layer count of the whole model.
        rate: size of each bias update.
        sequence_parallel: (rank, size) of the group that splits rows inside the model into equal consecutive parts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], layers: int, rate: float, sequence_parallel: tuple[int, int] = (0, 1)) -> None:
        self._rate, (self._part, self._parts) = rate, sequence_parallel
        self._routers: dict[int, Any] = {}
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            self._routers[router.layer_number - 1] = router  # Megatron counts from 1, over all stages
            router.register_forward_hook(self._count)
        self._layers, self._experts = layers, max((len(router.expert_bias) for router in self._routers.values()), default=0)
        self._real: torch.Tensor | None = None
        self._tokens: dict[int, torch.Tensor] = {}

    @contextmanager
    def counting(self, batch: MicroBatch) -> Iterator[None]:
        """Count the experts of a training micro-batch during its forward pass. Experts of padding and filler experts of tokens without
        recorded experts (`Experts.known`) do not count; recomputation in the backward pass does not count again."""
        real = batch.segments >= 0 if batch.experts is None else batch.experts.known
        self._real = real.chunk(self._parts)[self._part]
        yield
        self._real = None

    def forget(self) -> None:
        """Reset the counts."""
        self._tokens.clear()

    def update(self) -> None:
        """Raise the biases of experts with fewer tokens than their layer's mean, and lower the biases of experts with more. Collective over
        all ranks: tensor- and context-parallel ranks count parts of the rows, stages their layers, data-parallel ranks their
        micro-batches."""
        experts = collectives.total(torch.tensor(self._experts), dist.ReduceOp.MAX)  # a stage may have no router
        tokens = torch.zeros(self._layers, int(experts), dtype=torch.float64, device=experts.device)
        for layer, counts in self._tokens.items():
            tokens[layer] = counts.to(experts.device, torch.float64)
        tokens = collectives.total(tokens)
        for layer, router in self._routers.items():
            step = self._rate * (tokens[layer].mean() - tokens[layer]).sign()
            router.expert_bias.add_(step.to(router.expert_bias.device, router.expert_bias.dtype))
        self.forget()

    def _count(self, router: Any, _: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Count a router's output. `routed`: (weights, bool map from rows to experts), both [rows, experts]."""
        if self._real is None:
            return
        layer, chosen = router.layer_number - 1, routed[1][self._real].sum(0)
        self._tokens[layer] = self._tokens[layer] + chosen if layer in self._tokens else chosen
