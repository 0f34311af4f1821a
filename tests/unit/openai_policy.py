"""An episode whose policy responds as a test specifies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from asyncmoe.engines.types import Listener, Sampling, VersionSpan
from asyncmoe.models import make
from asyncmoe.rollout.episodes.environment import Agent, Bounds, Episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.unit.generations import generation_of

IM_START, IM_END, EOS = make.SPECIALS.index("<|im_start|>"), make.SPECIALS.index("<|im_end|>"), make.SPECIALS.index("<eos>")
SAMPLING = Sampling(temperature=0.7, max_new_tokens=100, stop=(EOS, IM_END), top_p=0.9)


def tokenizer(folder: Path) -> Tokenizer:
    """That of the tiny model."""
    make.write_tokenizer(folder, 4096)
    (folder / "config.json").write_text(f'{{"vocab_size": {make.VOCAB}}}')
    return Tokenizer(folder)


@dataclass
class Policy:
    """Answers `say(all tokens so far)`, tokens of which the last ends it, or hangs where there are none.

    Attributes:
        asked: (agent's name, tokens given, what was said) of every request that was answered.
        hanging, cancelled: requests that were not answered, yet.
    """

    say: Callable[[tuple[int, ...]], tuple[int, ...]]
    asked: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    hanging: int = 0
    cancelled: int = 0

    async def speak(self, agent: Agent, given: tuple[int, ...], sampling: Sampling, listener: Listener | None) -> list[Turn]:
        said = self.say((*agent.tokens, *given))[: sampling.max_new_tokens]
        await asyncio.sleep(0)
        for token in said if listener is not None else ():
            if listener.hear([token]):
                break
            await asyncio.sleep(0)
        kept = listener.kept if listener is not None else None
        said = said[:kept]
        if not said:
            self.hanging += 1
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        self.asked.append((agent.name, given, said))
        finish = "stop" if said[-1] in sampling.stop or kept is not None else "length"
        return [Turn(given, generation_of(said, (-0.5,) * len(said), (VersionSpan("0", 0, len(said)),), finish, 0), 0)]

    def episode(self, known: Tokenizer, bounds: Bounds | None = None, sampling: Sampling = SAMPLING) -> Episode:
        """One that it plays in."""
        prompt = Prompt("1+1=", known.encode("1+1="), "2")
        return Episode(prompt, EpisodeId(0, 0, 0), known, Random(0), sampling, bounds or Bounds(1000, 1 << 20, 100), self.speak)


def text(known: Tokenizer, words: str, end: int = IM_END) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """A policy that always says the same."""
    return lambda seen: (*known.encode(words), end)
