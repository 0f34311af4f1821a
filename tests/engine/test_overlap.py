"""Which weights sampled which token, with SGLang's overlap schedule on and updates under load.

Every version makes one token certain, so a token names the version that sampled it. Prompts and lengths let a pause fall on
every kind of step, and `overlap_server` makes it fall on each kind in turn.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncmoe.config.model import MadeModel
from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.sglang import process as engines
from asyncmoe.engines.types import ABORTED, Generation, Sampling
from asyncmoe.models.make import VOCAB, make_model
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rpc.messages import WeightsCommit, WeightsStage
from asyncmoe.trajectory import Recording, Routing, Trajectory, decode_masks, decode_routes, validate
from tests.engine.certain import FIRST, head, token_of
from tests.engine.conftest import Rig, running, settings
from tests.engine.oracle import routes
from tests.engine.overlap_server import CASES

pytestmark = pytest.mark.engine

RUNNING = 6
TOP_K = 8
CLIENTS = 24
ARGUMENTS = ["--chunked-prefill-size", "64", "--max-prefill-tokens", "64"]
RECORDING = Recording(Routing(all_layers=2, layers=(0, 1), top_k=2, experts=8), masks=True, vocabulary=VOCAB)
PLAIN = Recording(vocabulary=VOCAB)


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose hidden states all have the same large entry 0, with the output layer of version 0."""
    path = tmp_path_factory.mktemp("overlap") / "model"
    make_model(path, MadeModel(), seed=0)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 100.0
    weights["lm_head.weight"] = head(0, VOCAB, weights["lm_head.weight"].shape[1])
    save_file(weights, file, metadata={"format": "pt"})
    return path


@dataclass
class Load:
    """Clients that send one request after the other, and their responses."""

    rig: Rig
    file: Path
    """Lines of JSON: what each pause found in flight."""
    hidden: int = 64

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.answered = self.aborted = self.tokens = self.cuts = 0
        self.records: list[Trajectory] = []

    @property
    def found(self) -> list[list[str]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    async def updates(self, count: int, interruption: Interruption = "in_place", aborts: bool = False, at_once: bool = False) -> None:
        """Publish so many versions while the clients ask; all of them have their last answer at the end.

        Args:
            at_once: by one call, not by broadcast in a pause.
            aborts: some responses are aborted while an engine stands still, and some clients go away.
        """
        self.rig.coordinator.driver.interruption = interruption
        async with self._asked(interruption, aborts):
            for _ in range(count):
                version = self.rig.pool.version + 1
                publishing = self._swap(version) if at_once else self._broadcast(version)
                await asyncio.gather(publishing, *([self._abort()] if aborts else []))
                await asyncio.sleep(0.02 * self.random.random())
        self.rig.coordinator.driver.interruption = "in_place"

    async def _broadcast(self, version: int) -> None:
        await self.rig.sender.publish(version, {"lm_head.weight": head(version, VOCAB, self.hidden)}, buckets=1)

    async def _swap(self, version: int) -> None:
        """The worker makes the weights itself (`overlap_server.load`)."""
        await self.rig.coordinator.handle(WeightsStage(version))
        await self.rig.coordinator.handle(WeightsCommit(version, update=version))

    @asynccontextmanager
    async def _asked(self, interruption: Interruption, aborts: bool) -> AsyncIterator[None]:
        done = asyncio.Event()
        clients = [asyncio.create_task(self._client(index, interruption, aborts, done)) for index in range(CLIENTS)]
        try:
            await asyncio.sleep(0.2)
            yield
            done.set()
            await asyncio.wait_for(asyncio.gather(*clients), 60.0)
        finally:
            for client in clients:
                client.cancel()

    async def _client(self, index: int, interruption: Interruption, aborts: bool, done: asyncio.Event) -> None:
        while not done.is_set():
            prompt = tuple(self.random.randrange(FIRST, VOCAB) for _ in range(self.random.choice((5, 20, 50, 150))))
            sampling = Sampling(1.0, self.random.choice((2, 9, 24, 60)), self._stops(index), recording=PLAIN)
            if index % 3 == 0 and interruption != "retract":
                sampling = replace(sampling, top_k=TOP_K, recording=RECORDING)
            if not aborts:
                turns = await respond(self.rig.pool, prompt, (), sampling, interruption)
                self._check(prompt, sampling, turns)
            elif index == 1:
                await self._leave(prompt, sampling)
            else:
                answer = await self.rig.pool.generate(prompt, sampling)
                self._check(prompt, sampling, [Turn(prompt, answer.generation, answer.salt)])

    def _stops(self, index: int) -> tuple[int, ...]:
        """Every other client has every other version end its responses, wherever they are."""
        near = range(self.rig.pool.version, self.rig.pool.version + 12)
        return tuple(token_of(version, VOCAB) for version in near if version % 2 == 0) if index % 2 else ()

    async def _leave(self, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Ask, and do not wait for the answer."""
        asking = asyncio.create_task(self.rig.engine.client.generate(prompt, replace(sampling, max_new_tokens=500), "left", 60.0))
        await asyncio.wait([asking], timeout=0.05 * self.random.random())
        asking.cancel()
        await asyncio.wait([asking])

    async def _abort(self) -> None:
        await asyncio.sleep(0.004 * self.random.random())
        await self.rig.engine.client.abort()

    def _check(self, prompt: tuple[int, ...], sampling: Sampling, turns: Sequence[Turn]) -> None:
        tokens = 0
        for turn in turns:
            self._check_versions(turn.generation)
            tokens += len(turn.generation.tokens)
        last = turns[-1].generation
        if last.finish == ABORTED:
            self.aborted += 1
        else:
            assert tokens == sampling.max_new_tokens or last.tokens[-1] in sampling.stop
        self.answered += 1
        self.tokens += tokens
        if sampling.recording is RECORDING and tokens:
            record = assemble(list(turns), EpisodeId(0, 0, 0), RECORDING, 0.0, {})
            validate(record, RECORDING, newest_version=self.rig.pool.version + 1)
            self.records.append(record)

    def _check_versions(self, generation: Generation) -> None:
        for span in generation.spans:
            sampled = set(generation.tokens[span.start : span.end])
            assert sampled <= {token_of(int(span.version), VOCAB)}, f"{generation.spans} of {generation.tokens}"
        self.cuts += len(generation.spans) - 1


@pytest.fixture(scope="module")
def reference(certain: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(certain, dtype=torch.float32).eval()


def check_record(record: Trajectory, reference: Any) -> None:
    """Its routes, and the ids each token was sampled from, are those of transformers with the output layer of the token's version.

    What lies under that layer is the same in all versions.
    """
    same = decode_routes(record.routes, "g0") == routes(reference, record.tokens)
    assert same.all(axis=(0, 2)).mean() > 0.99  # a tie within rounding may fall either way
    masks = decode_masks(record.masks, "g0")
    with torch.no_grad():
        states = reference.model(torch.from_numpy(record.tokens).long()[None]).last_hidden_state[0]
    for place in np.flatnonzero(record.loss_mask):
        logits = head(int(record.versions[place]), VOCAB, states.shape[1]) @ states[place - 1]
        mask = masks.ids[masks.offsets[place] : masks.offsets[place + 1]].tolist()
        assert len(set(mask) & set(logits.topk(TOP_K).indices.tolist())) >= TOP_K - 1  # so may one
        assert record.tokens[place] in mask


@pytest.fixture(scope="module")
def load(certain: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """An engine of `overlap_server`."""
    folder = tmp_path_factory.mktemp("load")
    config = settings(certain, folder, max_running=RUNNING, max_total_tokens=4096, args=ARGUMENTS)
    real = engines.command

    def command(*arguments: Any) -> list[str]:
        python, _, _, *rest = real(*arguments)
        return [python, "-m", "tests.engine.overlap_server", str(folder / "pauses"), *rest, "--enable-return-routed-experts"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "command", command)
        with running(config, runner) as rig:
            yield Load(rig, folder / "pauses")


def alive(load: Load) -> bool:
    """Check that it responds with the newest version."""
    answer: Generation = load.rig.run(load.rig.engine.client.generate((20, 30, 40), Sampling(1.0, 4, ()), "alive", 20.0))
    return bool(answer.tokens.tolist() == [token_of(load.rig.pool.version, VOCAB)] * 4)


def check_records(load: Load, reference: Any) -> None:
    """Some of them, those that most versions cut first."""
    ordered = sorted(load.records, key=lambda record: -len(set(record.versions[record.loss_mask].tolist())))
    assert len(ordered) >= CLIENTS // 3
    for record in ordered[:8]:
        check_record(record, reference)


@pytest.mark.parametrize("at_once", [False, True], ids=["in a pause", "at once"])
def test_every_token_has_the_version_that_sampled_it(load: Load, reference: Any, thorough: bool, at_once: bool) -> None:
    before, cuts, load.records = len(load.found), load.cuts, []
    load.rig.run(load.updates(210 if thorough else 14, at_once=at_once))
    found = load.found[before:]
    cases = Counter(case for each in found for case in each)
    print(f"{len(found)} updates, {load.answered} responses, {load.tokens} tokens, {load.cuts - cuts} cuts: {cases}")
    for case in CASES:
        assert cases[case] >= (20 if thorough else 1), case
    assert load.cuts - cuts >= len(found)
    check_records(load, reference)
    assert alive(load)


@pytest.mark.parametrize(("interruption", "count"), [("abort_resume", 3), ("retract", 3), ("drain", 1)])
def test_also_where_responses_are_cut_short(load: Load, reference: Any, thorough: bool, interruption: Interruption, count: int) -> None:
    before, load.records = load.answered, []
    load.rig.run(load.updates(10 * count if thorough else count, interruption))
    assert load.answered - before >= CLIENTS
    if interruption != "retract":
        check_records(load, reference)
    assert alive(load)


def test_so_it_has_when_responses_are_aborted_in_the_pause_and_clients_leave(load: Load, thorough: bool) -> None:
    before = load.aborted
    load.rig.run(load.updates(40 if thorough else 3, aborts=True))
    assert load.aborted > before
    assert alive(load)
