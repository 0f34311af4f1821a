"""Compare the weights that engines loaded from the model's files with the trainer's, before anything is sampled.

Engines have their own loader. If its weights differ, engines would sample with them until the first update, or, if an adapter is trained,
for the whole run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from asyncmoe.config import Config
from asyncmoe.rpc.client import ANSWER_S, Client
from asyncmoe.rpc.messages import EnginesAsk, Probe, WeightsLoaded
from asyncmoe.trainer.data.batch_client import Update, microbatches
from asyncmoe.trainer.data.schedule import schedule
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model.gpt import Model
from asyncmoe.trainer.step import logprobs_only
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory
from asyncmoe.weights.sender.expected_checksums import ExpectedChecksums

_TEXTS, _TOKENS, _COMMON = 4, 65, 20_000
"""Probes: number of texts, tokens in each (the first has no log-probability), and upper bound of the tokens' ids: higher ids are rare
tokens that the model may never have seen."""


def compare(model: Model, expected: ExpectedChecksums, client: Client, step: int) -> None:
    """Have the controller compare the weights that engines loaded (not adapters). Collective over all ranks.

    If these weights are version `step`, engines may then sample. If they are not and no adapter is trained, nothing is compared: a version
    replaces them before anything is sampled.

    Args:
        client: this rank's connection to the controller.

    Raises:
        Disagreement: names an engine, and the first parameters that differ. Only rank 0 raises it; its exit ends the other ranks.
        AsyncmoeError: engines did not start.
    """
    config, adapter = expected.config, expected.config.adapter
    first = step == 0 and (adapter is None or adapter.start is None)
    if not first and adapter is None:
        return
    if expected.of_loaded:
        request = WeightsLoaded(expected.of_files(), None, first, adapter is not None)
    else:
        draw = random.Random(config.run.seed)
        texts = [tuple(draw.choices(range(min(_COMMON, model.hf["vocab_size"])), k=_TOKENS)) for _ in range(_TEXTS)]
        with nullcontext() if adapter is None else attach.switched_off(model.chunks):
            found = _scored(model, config, texts)
        request = WeightsLoaded((), Probe(tuple(texts), tuple(tuple(map(float, found[i])) for i in range(_TEXTS))), first)
    client.ask(EnginesAsk(config.engines.start_timeout_s), config.engines.start_timeout_s + ANSWER_S)
    if model.mesh.rank == 0:
        client.ask(request, config.sync.timeout_s + ANSWER_S)


def _scored(model: Model, config: Config, texts: Sequence[Sequence[int]]) -> dict[int, np.ndarray]:
    """Return the log-probabilities of texts at temperature 1, float32[T] by text number; routers choose live."""
    mesh, trainer, bare = model.mesh, config.trainer, {i: _bare(i, np.asarray(text, np.int32)) for i, text in enumerate(texts)}
    lengths = [len(text) for text in texts]
    planned = schedule(lengths, mesh.dp, trainer.tokens_per_microbatch, trainer.pack, mesh.grid)
    update = Update(tuple(bare), planned, dict.fromkeys(bare, 0.0))
    return logprobs_only(model, microbatches(update, bare, dict.fromkeys(bare, np.zeros(1)), config, mesh), lengths, 1.0)


def _bare(number: int, tokens: np.ndarray) -> Trajectory:
    """Return a text as a trajectory without recordings."""
    nothing, none = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool)
    return Trajectory(f"probe{number}", number, 0, tokens, none, nothing, np.full(len(tokens), NOT_SAMPLED, np.int32), 0.0, "length")
