"""Routing replay: every token goes through the experts that the engine chose, weighted by the trainer's own router.

Megatron's router asks its `RouterReplay` for the experts of its tokens (`transformer/moe/router_replay.py`, megatron-core 0.16) and uses
these experts' scores: a softmax over them, gathered probabilities, or normalised sigmoid scores without the selection bias, depending on
the model. Gradients therefore reach the router, while the choice of experts is data (Rollout Routing Replay, arXiv 2510.11370;
"Keep Routing", DeepSeek-V3.2, arXiv 2512.02556 section 3.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from asyncmoe.errors import InvariantBroken
from asyncmoe.platform import collectives
from asyncmoe.trainer.data.replay_data import Experts
from asyncmoe.trajectory import Routing


class RecordedRouter(RouterReplay):  # type: ignore[misc]
    """Supplies one router with recorded experts.

    Each forward pass is given its experts. Backward passes recompute activations later, in the same order, and consume the experts again,
    oldest first. Unlike Megatron's `RouterReplay`, this class registers in no process-wide list of routers, keeps experts for the
    backward pass only if activations are recomputed, and counts how often the live router would have chosen other experts.

    Args:
        layer: number of the layer in the model.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.router_replay_action: RouterReplayAction | None = None
        self._now: Experts | None = None
        self._later: deque[Experts] = deque()
        self._differ: list[torch.Tensor] = []
        self._by_row: torch.Tensor | None = None

    def forward(self, experts: Experts, recomputed: bool, by_row: torch.Tensor | None = None) -> None:
        """Set the experts of the next forward pass.

        Args:
            recomputed: whether the backward pass will recompute this forward pass.
            by_row: int32[rows]; 1 is added in each row for which the live router would have chosen other experts.
        """
        self._by_row = by_row
        self._now, self.router_replay_action = experts, RouterReplayAction.REPLAY_FORWARD
        if recomputed:
            self._later.append(experts)

    def backward(self) -> None:
        """End the forward pass: later requests come from a backward pass."""
        self._now, self._by_row, self.router_replay_action = None, None, RouterReplayAction.REPLAY_BACKWARD

    def end(self) -> torch.Tensor:
        """End the step and reset.

        Returns:
            int64[2]: rows for which the live router chose other experts, and all rows with recorded experts, since the last reset.

        Raises:
            InvariantBroken: a forward pass marked for recomputation was not recomputed.
        """
        if self._later:
            raise InvariantBroken(f"router of layer {self.layer}: {len(self._later)} micro-batches were not recomputed")
        counts = torch.stack(self._differ).sum(0) if self._differ else torch.zeros(2, dtype=torch.int64)
        self.forget()
        return counts

    def forget(self) -> None:
        """Discard experts and counts; route live."""
        self._now, self._by_row, self.router_replay_action = None, None, None
        self._later.clear()
        self._differ.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by Megatron's router: scores [rows, experts] -> (scores of the chosen experts, their int64 ids), both [rows, topk]."""
        assert default_compute_topk is not None
        if self.router_replay_action is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts = self._experts(scores.shape[0], topk)
        chosen = experts.ids[experts.layers.index(self.layer)].to(torch.int64)
        if self._now is not None:
            with torch.no_grad():
                live = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1]
            self._count(live, chosen, experts.known)
        return scores.gather(1, chosen), chosen

    def _experts(self, rows: int, topk: int) -> Experts:
        if self._now is None and not self._later:
            raise InvariantBroken(f"router of layer {self.layer}: a backward pass asks for experts, but all were used")
        experts = self._now if self._now is not None else self._later.popleft()
        if experts.ids.shape[1:] != (rows, topk):
            raise InvariantBroken(f"router of layer {self.layer}: got [rows, top] {[rows, topk]}, expected {list(experts.ids.shape[1:])}")
        return experts

    def _count(self, live: torch.Tensor, chosen: torch.Tensor, known: torch.Tensor) -> None:
        differs = (live.sort(1).values != chosen.sort(1).values).any(1) & known
        if self._by_row is not None:
            self._by_row += differs
        self._differ.append(torch.stack([differs.sum(), known.sum()]))


class Replay:
    """Routing replay for all routers of this rank.

    Args:
        chunks: the model chunks of this pipeline stage; this object supplies the experts of their routers from now on.
        config: Megatron's model configuration.
        routing: routing of the whole model.
        sequence_parallel: (rank, size) of the group that splits rows inside the model into equal consecutive parts.

    Raises:
        InvariantBroken: a router is in a layer that `routing` lacks, routers do not support replay (fused or Sinkhorn), or the
            model has layers that engines do not record (multi-token prediction).
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: Any, routing: Routing, sequence_parallel: tuple[int, int] = (0, 1)
    ) -> None:
        if config.moe_router_fusion or config.mtp_num_layers or config.moe_router_load_balancing_type == "sinkhorn":
            raise InvariantBroken("routing cannot be kept with a fused or Sinkhorn router or with multi-token prediction")
        selective = config.recompute_granularity == "selective"
        self._recompute = config.recompute_granularity == "full" or (selective and "moe" in config.recompute_modules)
        self._routing, (self._part, self._parts) = routing, sequence_parallel
        self._routers = [[_take_over(router) for router in _routers(chunk)] for chunk in chunks]
        layers = sorted(router.layer for router in self._all)
        if not set(layers) <= set(routing.layers) or len(set(layers)) != len(layers):
            raise InvariantBroken(f"got routers of layers {layers}, expected some of {routing.layers}, each once")
        self.layers = tuple(layers)
        """Numbers of the layers whose routes this rank needs, ascending."""

    @property
    def routing(self) -> Routing:
        """The routing of this rank's layers."""
        r = self._routing
        return Routing(r.all_layers, self.layers, r.top_k, r.experts)

    @contextmanager
    def forward(self, chunk: int, experts: Experts | None, by_row: torch.Tensor | None = None) -> Iterator[None]:
        """Replay experts during the forward pass of a micro-batch through a chunk.

        Args:
            experts: experts of this rank's rows of the micro-batch, before tensor-parallel ranks split the rows; None: route live.
            by_row: int32[rows of the micro-batch]; each router adds 1 for rows it would have routed differently. None: not counted by row.
        """
        routers = self._routers[chunk]
        if experts is None:
            for router in routers:
                router.forget()
            yield
            return
        size = experts.known.shape[0] // self._parts
        part = slice(self._part * size, (self._part + 1) * size)
        mine = experts.take(part)
        for router in routers:
            router.forward(mine, self._recompute and torch.is_grad_enabled(), None if by_row is None else by_row[part])
        yield
        for router in routers:
            router.backward()

    def end(self) -> dict[int, float]:
        """End a step or a forward-only pass. Collective over all ranks.

        Returns:
            By layer number, the share of tokens for which the live router would have chosen other experts; {} if nothing was replayed.
        """
        counts = torch.zeros(len(self._routing.layers), 2, dtype=torch.int64, device=collectives.device())
        for router in self._all:
            counts[self._routing.layers.index(router.layer)] = router.end().to(counts.device)
        # Tensor- and context-parallel ranks hold parts of the rows, pipeline stages their layers, data-parallel ranks their micro-batches,
        # so the sum over all ranks counts each row of a layer once.
        total = collectives.total(counts).tolist()
        return {layer: differ / rows for layer, (differ, rows) in zip(self._routing.layers, total, strict=True) if rows}

    def forget(self) -> None:
        """Discard all experts and counts; route live from now on."""
        for router in self._all:
            router.forget()

    @property
    def _all(self) -> list[RecordedRouter]:
        return [router for chunk in self._routers for router in chunk]


def _routers(chunk: torch.nn.Module) -> list[Any]:
    return [module for module in chunk.modules() if isinstance(module, TopKRouter)]


def _take_over(router: Any) -> RecordedRouter:
    recorded = RecordedRouter(router.layer_number - 1)  # Megatron counts from 1, over all stages
    router.router_replay = recorded
    return recorded
