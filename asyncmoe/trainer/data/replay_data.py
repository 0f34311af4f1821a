"""Engine recordings over a micro-batch's rows: experts to replay, the ids each target was sampled from, and those most probable there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncmoe.errors import InvariantBroken
from asyncmoe.trajectory import Routes, Routing, Trajectory, decode_masks, decode_routes


@dataclass(frozen=True, eq=False)
class Experts:
    """Recorded experts by row.

    Attributes:
        layers: numbers of the covered layers of the model, ascending.
        ids: [layers, T, K], uint8 (up to 256 experts) or int16 (torch has no arithmetic for uint16); distinct within a row.
        known: bool[T]; False for rows without recorded experts: padding, and a trajectory's last token, which was never an engine's input.
            Nothing depends on the output of such a row; its ids are filler that spreads the load.
    """

    layers: tuple[int, ...]
    ids: torch.Tensor
    known: torch.Tensor

    def to(self, device: torch.device) -> Experts:
        """Return a copy on another device."""
        return replace(self, ids=self.ids.to(device, non_blocking=True), known=self.known.to(device, non_blocking=True))

    def take(self, rows: torch.Tensor | slice) -> Experts:
        """Return the experts of the given rows."""
        return replace(self, ids=self.ids[:, rows], known=self.known[rows])


@dataclass(frozen=True, eq=False)
class Support:
    """The ids that targets were sampled from; targets of rows without ids were sampled from the whole vocabulary.

    Attributes:
        here: bool[T]; True if the row has ids.
        rows: int64[n]; row of each id.
        ids: int64[n]; vocabulary ids. A row's ids are distinct and include its target.
    """

    here: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor

    def to(self, device: torch.device) -> Support:
        """Return a copy on another device."""
        return Support(*(x.to(device, non_blocking=True) for x in (self.here, self.rows, self.ids)))

    def take(self, rows: torch.Tensor) -> Support:
        """Return the support of the given rows (int64[n], distinct), renumbered in the given order."""
        place = torch.full(self.here.shape, -1, dtype=torch.int64, device=rows.device)
        place[rows] = torch.arange(len(rows), device=rows.device)
        row = place[self.rows]
        return Support(self.here[rows], row[row >= 0], self.ids[row >= 0])


def experts(trajectories: Sequence[Trajectory], starts: Sequence[int], rows: int, routing: Routing) -> Experts:
    """Lay out the experts of trajectories, one row per token.

    Digests are not checked again: `asyncmoe.trajectory.decode` has checked them, and a batch is laid out more than once.

    Args:
        trajectories: the micro-batch's trajectories; each has routes of all of `routing.layers`, and perhaps of other layers.
        starts: first row of each trajectory.
        rows: row count of the micro-batch.
        routing: its `layers` are the wanted layers.

    Raises:
        InvariantBroken: a trajectory lacks routes of a wanted layer; such trajectories are rejected on intake.
    """
    ids = np.empty((len(routing.layers), rows, routing.top_k), np.uint8 if routing.experts <= 1 << 8 else np.int16)
    known = np.zeros(rows, np.bool_)
    for trajectory, start in zip(trajectories, starts, strict=False):
        if trajectory.routes is None:
            raise InvariantBroken(f"{trajectory.key} has no routes, but routing is kept")
        chosen = _of_layers(trajectory.routes, routing, trajectory.key)
        ids[:, start : start + chosen.shape[1]] = chosen
        known[start : start + chosen.shape[1]] = True
    others = np.flatnonzero(~known)
    ids[:, others] = (others[:, None] * routing.top_k + np.arange(routing.top_k)) % routing.experts
    return Experts(routing.layers, torch.from_numpy(ids), torch.from_numpy(known))


def support(trajectories: Sequence[Trajectory], starts: Sequence[int], rows: int) -> Support | None:
    """Lay out the supports of trajectories: row t has the support of token t + 1. Return None if none was recorded.

    Args: as for `experts`.
    """
    counts = np.zeros(rows, np.int64)
    pieces: list[np.ndarray] = []
    for trajectory, start in zip(trajectories, starts, strict=False):
        if trajectory.masks is None:
            continue
        masks = decode_masks(trajectory.masks, trajectory.key)
        counts[start : start + len(trajectory) - 1] = masks.counts[1:]
        pieces.append(masks.ids[masks.offsets[1] :])
    if not pieces:
        return None
    ids = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    return Support(torch.from_numpy(counts > 0), torch.from_numpy(np.repeat(np.arange(rows), counts)), ids)


def top(trajectories: Sequence[Trajectory], starts: Sequence[int], rows: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Lay out `MicroBatch.top_ids` and `top_logprobs`, [K, rows]; None if none were recorded.

    Args: as for `experts`.
    """
    recorded = [(one.top, start + np.flatnonzero(one.loss_mask) - 1) for one, start in zip(trajectories, starts, strict=False)]
    width = max((0 if one is None else one.shape[1] for one, _ in recorded), default=0)
    if not width:
        return None, None
    ids, logprobs = np.zeros((width, rows), np.int64), np.full((width, rows), -np.inf, np.float32)
    for one, places in recorded:
        if one is not None:
            ids[:, places], logprobs[:, places] = one["id"].T, one["logprob"].T
    return torch.from_numpy(ids), torch.from_numpy(logprobs)


def _of_layers(routes: Routes, routing: Routing, key: str) -> np.ndarray:
    """Return the experts of the wanted layers: [layers, rows, top_k]."""
    place = {layer: i for i, layer in enumerate(routes.layers)}
    missing = [layer for layer in routing.layers if layer not in place]
    if missing or (routes.top_k, routes.experts) != (routing.top_k, routing.experts):
        detail = f"layers {routes.layers}, top {routes.top_k} of {routes.experts}"
        raise InvariantBroken(f"routes of {key}: got {detail}, expected {routing}")
    if routes.layers == routing.layers:
        return decode_routes(routes, key, checked=True)
    if not routing.layers:  # a pipeline stage of layers without experts
        return decode_routes(routes.part(0, 1), key, checked=True)[:0]
    parts = [routes.part(place[layer], place[layer] + 1) for layer in routing.layers]
    return np.concatenate([decode_routes(part, key, checked=True) for part in parts])
