"""A response interrupted by two updates, in every mode: the records of each token are the results of the pass that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.types import Sampling
from asyncmoe.models.make import VOCAB
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.trajectory import Recording, Trajectory, decode_routes, validate
from tests import families
from tests.engine.conftest import PROMPT, ROUTING, Rig
from tests.engine.oracle import TIE, Oracle, perturbed

pytestmark = pytest.mark.engine
TOKENS = 500
RECORDING = Recording(ROUTING, vocabulary=VOCAB)
SAMPLING = Sampling(1.0, TOKENS, (), recording=RECORDING)


@pytest.fixture(scope="module")
def oracles(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Oracle]:
    folder = tmp_path_factory.mktemp("interruption")
    first = Oracle(model)
    return [perturbed(first, folder / str(seed), seed) for seed in range(3)]


class Played:
    """The records of one response, requested at version `first` and interrupted at `first` + 1 and `first` + 2."""

    def __init__(self, rig: Rig, oracles: Sequence[Oracle], interruption: Interruption) -> None:
        self.first = rig.pool.version + 1
        rig.run(self._play(rig, oracles, interruption))
        self.bounds = [int(np.argmax(self.record.versions == v)) for v in sorted(set(self.record.versions[self.record.loss_mask].tolist()))]

    async def _play(self, rig: Rig, oracles: Sequence[Oracle], interruption: Interruption) -> None:
        rig.coordinator.driver.interruption = "in_place"
        await rig.sender.publish(self.first, oracles[0].weights)
        rig.coordinator.driver.interruption = interruption
        self.lost, self.recomputed = rig.pool.lost_tokens, rig.pool.recomputed_tokens
        asking = asyncio.create_task(respond(rig.pool, PROMPT, (), SAMPLING, interruption))
        pauses = []
        for number in (1, 2):
            await asyncio.sleep(0.4)
            pauses += (await rig.sender.publish(self.first + number, oracles[number].weights)).pause_ms
        turns = await asking
        rig.coordinator.driver.interruption = "in_place"
        self.turns = len(turns)
        self.record = assemble(turns, EpisodeId(0, 0, 0), RECORDING, 0.0, {})
        self.lost, self.recomputed = rig.pool.lost_tokens - self.lost, rig.pool.recomputed_tokens - self.recomputed
        print(f"{interruption}: pauses {[round(p) for p in pauses]} ms, {self.lost} tokens lost, {self.recomputed} computed again")

    @property
    def versions(self) -> list[int]:
        return sorted({int(v) - self.first for v in self.record.versions[self.record.loss_mask]})


def passes(
    record: Trajectory, bounds: Sequence[int], models: Sequence[Any], keep: bool, replay: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """By transformers: log-probabilities of the sampled tokens, and by how much, for each token but the last
    and each layer, the router's logit of an expert that was not recorded exceeds that of one that was.

    Args:
        bounds: where each model's tokens begin.
        keep: each model continues on the keys and values of the previous one; else it computes the whole prefix.
        replay: take the recorded experts, so that a near tie falls the same way.
    """
    ids, experts = torch.from_numpy(record.tokens).long(), torch.from_numpy(decode_routes(record.routes, "g0").astype(np.int64))
    ends = [*(b - 1 for b in bounds[1:]), len(ids) - 1]  # a model does not see the last token it samples
    logprobs, excess, past, start = [], [], None, 0
    for model, end in zip(models, ends, strict=True):
        seen: list[torch.Tensor] = []
        route = partial(_route, experts[:, start:end], replay, seen)
        with torch.no_grad(), families.hooked(families.routers(model).values(), route):
            out = model(ids[None, start if keep else 0 : end], past_key_values=past if keep else None, use_cache=True)
        past = out.past_key_values
        logits = out.logits[0, -(end - start) :]
        logprobs.append(logits.log_softmax(-1).gather(1, ids[start + 1 : end + 1, None])[:, 0])
        excess.append(torch.stack(seen, 1))
        start = end
    sampled = torch.from_numpy(record.loss_mask[1:])
    return torch.cat(logprobs)[sampled].numpy(), torch.cat(excess).numpy()


def _route(every: torch.Tensor, replay: bool, seen: list[torch.Tensor], layer: int, gate: Any, out: Any) -> Any:
    """A router's output, with the recorded experts of its last tokens, `every` [layers, tokens, top_k], if `replay`."""
    recorded, logits, scores, chosen = every[layer], out[0], out[1].clone(), out[2].clone()
    rows = slice(len(logits) - len(recorded), None)
    chosen[rows], scores[rows] = recorded, logits[rows].softmax(-1).gather(1, recorded)
    scores[rows] /= scores[rows].sum(-1, keepdim=True) if gate.norm_topk_prob else 1
    others = logits[rows].scatter(1, recorded, -torch.inf)
    seen.append(others.amax(-1) - logits[rows].gather(1, recorded).amin(-1))
    return (logits, scores, chosen) if replay else None


def check(played: Played, models: Sequence[Any], keep: bool) -> None:
    record = played.record
    validate(record, RECORDING, newest_version=played.first + 2)
    assert int(record.loss_mask.sum()) == TOKENS
    logprobs, excess = passes(record, played.bounds, models, keep)
    np.testing.assert_allclose(record.logprobs[record.loss_mask], logprobs, atol=1e-4, err_msg=f"versions begin at {played.bounds}")
    assert excess.max() < TIE


@pytest.mark.parametrize(
    ("interruption", "turns", "versions"),
    [("in_place", 1, [0, 1, 2]), ("abort_resume", 3, [0, 1, 2]), ("abort_retry", 1, [2]), ("drain", 1, [0])],
)
def test_versions_are_of_the_mode(rig: Rig, oracles: list[Oracle], interruption: Interruption, turns: int, versions: list[int]) -> None:
    """In place keeps keys and values; a resumed response recomputes its prefixes, a retried one is discarded."""
    played = Played(rig, oracles, interruption)
    assert (played.turns, played.versions) == (turns, versions)
    assert (played.lost > 0) == (interruption == "abort_retry")
    if len(versions) > 1:
        assert played.recomputed == (0 if interruption == "in_place" else sum(played.bounds[1:]))
    assert played.record.is_pure == (len(versions) == 1)
    check(played, [oracles[version].model for version in versions], keep=interruption == "in_place")


def test_retract_computes_keys_and_values_again(rig: Rig, oracles: list[Oracle]) -> None:
    """Without routes, because SGLang reports the new weights' routes for old tokens."""
    played = Played(rig, oracles, "retract")
    assert (played.turns, played.lost, played.versions) == (1, 0, [0, 1, 2])
    logprobs, excess = passes(played.record, played.bounds, [oracle.model for oracle in oracles], keep=False, replay=False)
    np.testing.assert_allclose(played.record.logprobs[played.record.loss_mask], logprobs, atol=1e-4)
    assert excess[: played.bounds[1] - 1].max() > TIE  # why it is refused where routing is kept


def test_a_response_in_pieces_is_one_response(rig: Rig, oracles: list[Oracle]) -> None:
    async def play() -> list[Turn]:
        await rig.sender.publish(rig.pool.version + 1, oracles[0].weights)
        return await respond(rig.pool, PROMPT, (), SAMPLING, "in_place", piece=128)

    turns = rig.run(play())
    assert [len(turn.generation.tokens) for turn in turns] == [128] * 3 + [116]
    record = assemble(turns, EpisodeId(0, 0, 0), RECORDING, 0.0, {})
    validate(record, RECORDING, newest_version=rig.pool.version)
    assert record.is_pure
    logprobs, excess = passes(record, [len(PROMPT)], [oracles[0].model], keep=False)
    np.testing.assert_allclose(record.logprobs[record.loss_mask], logprobs, atol=1e-4)
    assert excess.max() < TIE
    before = len(PROMPT)
    for earlier, turn in pairwise(turns):
        before += len(earlier.generation.tokens)
        assert turn.generation.cached_tokens >= before - 2, "the engine still has the keys and values"
