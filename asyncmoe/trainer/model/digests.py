"""Digests of a trainer's state by tensor. They do not depend on the parallel layout: the same values have the same digests.

A digest is a sum of terms over the elements of a canonical tensor (`asyncmoe.reshard.element_digest`), with a seed for each tensor and kind
of value. Of replicas one counts. Between layouts of the same dtype all digests of equal values are equal. The digest of the optimizer's
state covers Adam's averages and, of bfloat16 weights, the float32 masters; float32 weights are their own masters, if they have any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from asyncmoe.platform import collectives, megatron
from asyncmoe.reshard.element_digest import ARRAY, FIRST, element_sums, seed_of
from asyncmoe.trainer.model import checkpoint
from asyncmoe.trainer.model.gpt import Model, gather_weights

megatron.prepare()

from megatron.core.optimizer import MegatronOptimizer  # noqa: E402

from asyncmoe.platform.megatron import canonical  # noqa: E402


class StateDigests:
    """Digests of the state of a model and its optimizer. Collective over all ranks, as are all methods.

    Every method returns uint64[len(tensors)], the same on every rank.

    Attributes:
        tensors: names of the canonical tensors in the order of the forward pass, the same in every layout, such as
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight", which are all experts of layer 3; only the adapters' if adapters are
            trained.
    """

    def __init__(self, model: Model, optimizer: MegatronOptimizer) -> None:
        self._model = model
        placed = canonical.placed(checkpoint.sharded_state(model, None, loading=False))
        self.tensors = canonical.names_of(placed)
        numbers = {name: number for number, name in enumerate(self.tensors)}
        saved = [one for one in placed if not any(one.replica)]
        self._weights = [one.data for one in saved]
        self._weight_boxes = _table((one.boxes, numbers[one.name]) for one in saved)

        # Data-parallel ranks have different parts of a distributed optimizer's state, so each counts.
        known, axes = {one.data: one for one in placed}, 2 if checkpoint.distributed(model) else 3
        trained = [one.data for one in placed if isinstance(one.data, torch.nn.Parameter)]
        self._held = [one for one in canonical.held(optimizer, trained) if not any(known[one.parameter].replica[:axes])]
        whole = [known[one.parameter] for one in self._held]
        clipped = (canonical.clipped(one.boxes, held.own) for one, held in zip(whole, self._held, strict=True))
        self._gradient_boxes = _table(zip(clipped, (numbers[one.name] for one in whole), strict=True))
        self._state_boxes = self._gradient_boxes.copy()
        self._state_boxes[:, FIRST] -= np.array([one.own.start for one in self._held], np.int64)[self._state_boxes[:, ARRAY]]

    def gradient(self) -> np.ndarray:
        """Return digests of the gradients, reduced over ranks, in the buffers of Megatron's data parallelism; 0 for routers' selection
        biases, which have none."""
        return self._digests({"gradient": [one.parameter.main_grad for one in self._held]}, self._gradient_boxes)

    def weights(self) -> np.ndarray:
        """Return digests of the saved parameters and buffers, among them the routers' selection biases."""
        gather_weights(self._model)
        return self._digests({"weight": self._weights}, self._weight_boxes)

    def optimizer(self) -> np.ndarray:
        """Return digests of Adam's averages and the float32 masters. Averages that do not exist before the first step count as zeros."""
        kinds = ("exp_avg", "exp_avg_sq", "param") if self._model.dtype == torch.bfloat16 else ("exp_avg", "exp_avg_sq")
        states = [(one.states(), one.own) for one in self._held]
        each = {kind: [state[kind] if kind in state else torch.zeros(len(own)) for state, own in states] for kind in kinds}
        return self._digests(each, self._state_boxes)

    def _digests(self, values: Mapping[str, Sequence[torch.Tensor]], boxes: np.ndarray) -> np.ndarray:
        """Return the digests of tensors by kind of value, each with the same boxes, as `element_sums` takes them."""
        sums = np.zeros(len(self.tensors), np.uint64)
        for kind, tensors in values.items():
            seeds = np.array([seed_of(f"{kind} {name}") for name in self.tensors], np.uint64)
            sums += element_sums(tensors, boxes, seeds, torch.get_num_threads())
        found: np.ndarray = collectives.total(torch.from_numpy(sums.view(np.int64))).cpu().numpy().view(np.uint64)
        return found


def _table(each: Iterable[tuple[np.ndarray, int]]) -> np.ndarray:
    """Return boxes as `element_sums` takes them, from the boxes of each array (`Placed.boxes`) and the number of its tensor."""
    rows = [np.insert(np.insert(boxes, 5, place, axis=1), 0, number, axis=1) for number, (boxes, place) in enumerate(each)]
    return np.concatenate(rows) if rows else np.empty((0, 7), np.int64)
