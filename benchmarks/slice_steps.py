"""Training steps of the first layers of Qwen3-30B-A3B, built as a run builds them. Importing this prepares Megatron."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from asyncmoe.config import parse
from asyncmoe.config.model import MadeModel
from asyncmoe.models import family_of, make, trainer_parallel
from asyncmoe.models.cost import operations
from asyncmoe.plan import budget, memory
from asyncmoe.trainer import objective, start
from asyncmoe.trainer.data import batch
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trainer.losses import SupervisedLoss
from asyncmoe.trainer.model import gpt, mesh, optimizer
from asyncmoe.trainer.step import StepMetrics, logprobs_only, train_step
from asyncmoe.trajectory import Trajectory, encode_routes
from benchmarks.traces import traced
from benchmarks.trajectories import demonstrations

from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # isort: skip  # after `gpt` has prepared it

CARD = torch.cuda.is_available()
COUNT, TOKENS = (8, 1024) if CARD else (4, 64)
"""Sequences of the only micro-batch, and tokens of each."""
PEAK = 989e12
"""Floating-point operations per second of an H100 or H200 in dense bfloat16 (NVIDIA's datasheets give twice that, with sparsity)."""
_WARM, _ROUNDS = 2, 5
_PUBLISHED = Path(__file__).parents[1] / "examples/cluster/models/Qwen3-30B-A3B.json"
_BETWEEN_STEPS = ("weight sync", "copies to send", "delta base")
"""Parts of a trainer's planned memory that a step does not need."""


def settings(layers: int) -> dict[str, Any]:
    """The slice's Hugging Face configuration; without a card, a tiny model's."""
    return {**json.loads(_PUBLISHED.read_text()), "num_hidden_layers": layers} if CARD else make.settings(MadeModel(layers=layers))


class Steps:
    """A model with random weights, always the same, and one batch.

    The learning rate is 0 by default, so that a token's experts are the same whether they are replayed or chosen again.

    Attributes:
        batches: the micro-batch, by whether experts are replayed.
        planned: bytes that `asyncmoe plan` expects a step to take.
    """

    def __init__(self, place: mesh.Mesh, layers: int, trainer: Mapping[str, Any]) -> None:
        run: dict[str, Any] = {"run": {"dir": "unused", "steps": 1}, "model": {"path": "unused"}, "task": {"kind": "arithmetic"}}
        hf, config = settings(layers), parse({**run, "trainer": {"tokens_per_microbatch": COUNT * TOKENS, **trainer}})
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        self.built = gpt.build(hf, config, place)
        self.adam, replay = optimizer.build(config, self.built), start.replay(config, self.built)
        assert replay is not None
        self._replay = replay
        known = dict(enumerate(demonstrations(COUNT, TOKENS, hf["vocab_size"])))
        self.batches = {False: self._packed(known, False)}
        self.batches[True] = self._packed(self._recorded(known), True)
        parts = memory.trainer(hf, trainer_parallel(config), budget.training(config, hf, cpu=not CARD))[0].parts
        self.planned = sum(nbytes for name, nbytes in parts.items() if name not in _BETWEEN_STEPS)
        # A backward pass takes twice the operations of a forward pass; recomputation is not counted.
        self._operations = 3 * operations(family_of(hf).shape_of(hf), [TOKENS] * COUNT)

    def take(self, replayed: bool, lr: float = 0.0) -> tuple[float, StepMetrics]:
        """Take a step; return its seconds too."""
        begin = time.perf_counter()
        metrics = train_step(self.built, self.adam, [self.batches[replayed]], SupervisedLoss(), lr, replay=self._replay)
        if CARD:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, metrics

    def measured(self, trace: Path) -> dict[str, tuple[Any, str]]:
        """Take steps with and without replay in turn, then one with the profiler, which writes its trace (`traces.traced`).

        Returns:
            name -> (value, unit). step: with replay. mfu: operations / (step * `PEAK`). busy: time during which a kernel or copy runs,
            with the profiler; idle: 1 - busy / step.
        """
        turns = [(self.take(False), self.take(True)) for _ in range(_WARM + _ROUNDS)][_WARM:]
        step, metrics = median(seconds for _, (seconds, _) in turns), turns[-1][1][1]
        launches, busy = traced(lambda: self.take(True), trace)
        return {
            "switches": (self.built.switches.text, ""),
            "step": (step, "s"),
            "replay_share": (median(kept / plain for (plain, _), (kept, _) in turns) - 1, "of a step without replay"),
            "other_experts": (
                max(metrics.routing_mismatch.values()),
                "of a layer's tokens, which the router sends elsewhere than at first",
            ),
            "rate": (int(metrics.rows / step), "tokens/s"),
            "mfu": (self._operations / step / PEAK, f"of {PEAK:.3g} FLOP/s"),
            "launches": (launches, "kernels and copies; without a card, operations"),
            "busy": (busy, "s"),
            "idle": (1 - busy / step, "of a step"),
            "loss": (metrics.loss, "nats"),
            "grad_norm": (metrics.grad_norm, ""),
        }

    def free(self) -> None:
        """Give back the memory of weights and gradients. Hooks of Megatron's data parallelism keep the model alive."""
        for parameter in self.built.ddp[0].parameters():
            parameter.main_grad.untyped_storage().resize_(0)
            parameter.data = parameter.data.new_empty(0)

    def _packed(self, known: Mapping[int, Trajectory], replayed: bool) -> batch.MicroBatch:
        weights, routing = objective.token_weights([TOKENS - 1] * COUNT, "token_mean"), self._replay.routing if replayed else None
        return batch.pack(known, list(known), advantages=np.zeros(COUNT), weights=weights, grid=BatchGrid(), packed=True, routing=routing)

    def _recorded(self, known: Mapping[int, Trajectory]) -> dict[int, Trajectory]:
        """The trajectories with the experts that the routers choose for them now."""
        chosen: list[np.ndarray] = []

        def remember(_module: object, _inputs: object, out: Any) -> None:
            chosen.append(torch.nonzero(out[1])[:, 1].reshape(out[1].shape[0], -1).cpu().numpy())

        routers = (module for module in self.built.chunks[0].modules() if type(module).__name__ == "TopKRouter")
        hooks = [router.register_forward_hook(remember) for router in routers]
        logprobs_only(self.built, [self.batches[False]], [TOKENS] * COUNT, 1.0)
        for hook in hooks:
            hook.remove()
        routes = np.stack(chosen, axis=1).astype(np.int32).reshape(COUNT, TOKENS, len(chosen), -1)[:, :-1]
        routing = self._replay.routing
        return {i: replace(t, routes=encode_routes(np.ascontiguousarray(routes[i]), routing, t.key)) for i, t in known.items()}
