"""Compare what engines have loaded from the model's files with the trainer's weights, before anything is sampled.

Engines have a loader of their own. Whatever it does otherwise would be trained on until the first update, and under adapters for ever.
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
"""Probes: texts, tokens of each, of which the first has no log-probability, and how many of the vocabulary's first tokens they are drawn
from: the ids of rare tokens, which the model may never have seen, lie behind."""


def compare(model: Model, expected: ExpectedChecksums, client: Client, step: int) -> None:
    """Have the controller compare, adapters aside, and let engines sample if what they have loaded is version `step`. Collective over all
    ranks.

    Without adapters, engines that receive a version before they sample have nothing left of what they loaded: then nothing is compared.

    Args:
        client: this rank's connection to the controller.

    Raises:
        Disagreement: names an engine, and the first parameters that differ; on rank 0, which ends the others.
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
    """Return the log-probabilities of texts, float32[T] by number, at temperature 1; routers choose live."""
    mesh, trainer, bare = model.mesh, config.trainer, {i: _bare(i, np.asarray(text, np.int32)) for i, text in enumerate(texts)}
    lengths = [len(text) for text in texts]
    planned = schedule(lengths, mesh.dp, trainer.tokens_per_microbatch, trainer.pack, mesh.grid)
    update = Update(tuple(bare), planned, dict.fromkeys(bare, 0.0))
    return logprobs_only(model, microbatches(update, bare, dict.fromkeys(bare, np.zeros(1)), config, mesh), lengths, 1.0)


def _bare(number: int, tokens: np.ndarray) -> Trajectory:
    """Return a text as a trajectory without anything recorded."""
    nothing, none = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), bool)
    return Trajectory(f"probe{number}", number, 0, tokens, none, nothing, np.full(len(tokens), NOT_SAMPLED, np.int32), 0.0, "length")
