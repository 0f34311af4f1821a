"""A restarted episode gets its recorded responses, as long as it makes the same requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncmoe.config.rollout import Interruption
from asyncmoe.engines.pool import PooledGeneration
from asyncmoe.engines.types import ABORTED, Listener, Sampling, VersionSpan
from asyncmoe.log.turns import EpisodeId, Turns
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.recall import Recall
from asyncmoe.rollout.episodes.trajectory_builder import Turn
from asyncmoe.trajectory import TOP
from tests.unit.generations import generation_of
from tests.unit.log_lives import Home
from tests.unit.test_packed_answers import as_plain

KEY = EpisodeId(0, 0, 0)


class Scripted:
    """Answers with the tokens 0, 1, ... of one long response, as many as are asked for, `ends` in all; aborts as it is told."""

    def __init__(self, ends: int = 100, aborts: Sequence[int] = (), dies_after: int = 1000) -> None:
        self.ends, self.aborts, self.dies_after = ends, list(aborts), dies_after
        self.asked: list[tuple[int, int]] = []
        self.lost_tokens = self.recomputed_tokens = self.recalled_tokens = 0

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, routed: int = 0, request: Any = None, listener: Listener | None = None
    ) -> PooledGeneration:
        if len(self.asked) >= self.dies_after:
            raise KeyboardInterrupt
        begin = len(tokens) - 3
        self.asked.append((begin, sampling.max_new_tokens))
        most = self.aborts.pop(0) if self.aborts else sampling.max_new_tokens
        made = tuple(range(begin, min(begin + most, self.ends)))
        finish = "stop" if made[-1:] == (self.ends - 1,) else ABORTED if most < sampling.max_new_tokens else "length"
        if listener is not None:
            listener.hear(made)
        spans = (VersionSpan(str(len(self.asked)), 0, len(made)),)
        answer = generation_of(made, (-0.5,) * len(made), spans, finish, 0, b"routes", [[1, 2]])
        return PooledGeneration(replace(answer, top=np.full((len(made), 2), (-0.5, 7), TOP)), len(self.asked))


def answered(
    folder: Path, pool: Scripted, piece: int = 0, how: Interruption = "in_place", most: int = 50, temperature: float = 1.0
) -> list[Turn]:
    """One response, in a process of its own as far as the store knows."""

    async def ask() -> list[Turn]:
        with closing(Turns(Home().log(folder, "1.turns"), {0: 0})) as store:
            recall: Any = Recall(pool, store, KEY, resumes=how == "abort_resume")  # type: ignore[arg-type]
            sampling = Sampling(temperature, most, (7,))
            return await respond(pool, (7, 8, 9), [], sampling, how, answers=recall, piece=piece)  # type: ignore[arg-type]

    return asyncio.run(ask())


def said(turns: Sequence[Turn]) -> list[int]:
    return [token for turn in turns for token in turn.generation.tokens]


def everything(turns: Sequence[Turn]) -> list[Any]:
    """All that turns have, for comparison."""
    return [(turn.given, turn.salt, as_plain(turn.generation)) for turn in turns]


def test_a_whole_answer_is_recalled_with_all_it_has(tmp_path: Path) -> None:
    first, second = Scripted(), Scripted()
    turns = answered(tmp_path, first)
    assert everything(answered(tmp_path, second)) == everything(turns)
    assert (second.asked, second.recalled_tokens, first.recalled_tokens) == ([], 50, 0)


def test_a_response_goes_on_from_its_last_piece(tmp_path: Path) -> None:
    first, second = Scripted(dies_after=3), Scripted()
    with pytest.raises(KeyboardInterrupt):
        answered(tmp_path, first, piece=8)
    assert first.asked == [(0, 8), (8, 8), (16, 8)]
    turns = answered(tmp_path, second, piece=8)
    assert second.asked == [(24, 8), (32, 8), (40, 8), (48, 2)]
    assert (said(turns), second.recalled_tokens) == (list(range(50)), 24)
    assert [turn.salt for turn in turns] == [1, 2, 3, 1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"most": 49}, {"how": "abort_resume"}])
def test_another_request_is_sampled(tmp_path: Path, change: dict[str, Any]) -> None:
    answered(tmp_path, Scripted())
    pool = Scripted()
    answered(tmp_path, pool, **change)
    assert len(pool.asked) == 1
    assert pool.recalled_tokens == 0


def test_parts_that_an_update_cut_short_are_recalled_only_where_they_are_continued(tmp_path: Path) -> None:
    turns = answered(tmp_path / "resumed", Scripted(aborts=[5, 6]), how="abort_resume")
    assert [len(turn.generation.tokens) for turn in turns] == [5, 6, 39]
    again = Scripted()
    assert everything(answered(tmp_path / "resumed", again, how="abort_resume")) == everything(turns)
    assert again.asked == []
    answered(tmp_path / "retried", Scripted(aborts=[5]), how="abort_retry")
    again = Scripted()
    assert said(answered(tmp_path / "retried", again, how="abort_retry")) == list(range(50))
    assert again.asked == [], "the whole answer was recorded, not the part that was thrown away"


@pytest.mark.parametrize("how", ["abort_retry", "drain"])
def test_modes_that_need_whole_requests_have_no_pieces(tmp_path: Path, how: Interruption) -> None:
    pool = Scripted()
    answered(tmp_path, pool, piece=8, how=how)
    assert pool.asked == [(0, 50)]
