"""Which request goes next, and to which engine. Decisions only: nothing here waits or talks to anyone.

Next (`Waiting`): what continues, a response that a weight update cut short or a later turn of a running episode, before what is new, so
that the tail of an episode never waits for the head of another; among new ones those expected to be longest first, where that is asked
for, because a long response that starts last is what everyone waits for at the end (longest processing time first; Graham, 1969). Nobody
starves: a request is overtaken at most `patience` times.

Engine (`choose`): the one with the fewest requests, or, so that prefixes are found in an engine's cache, the one that has the
conversation so far, else the same for all requests of a prompt, as long as it is not much busier than the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from asyncmoe.config.generation import Balance, Order

KEPT_PROMPTS = 1024
"""Prompts whose lengths `Lengths` remembers: the most recent ones."""
KEPT_CONVERSATIONS = 65536
"""Conversations whose engine `Homes` remembers: the most recent ones."""


@dataclass(frozen=True)
class ScheduledRequest:
    """What scheduling knows of a request.

    Attributes:
        prompt: names the prompt of its episode; requests of the same one share a prefix, and have similar lengths.
        continues: it goes on with an episode that has been at an engine before.
        sampled: tokens of the same response that earlier requests made.
        conversation: names what it goes on with, or begins: one agent's part in an episode. "": none.
    """

    prompt: str = ""
    continues: bool = False
    sampled: int = 0
    conversation: str = ""


UNKNOWN = ScheduledRequest()


def choose(loads: Mapping[str, int], prompt: str, balance: Balance, slack: int, last: str = "") -> str:
    """The engine a request goes to.

    `prefix_affine` is rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads: each prompt has its own order of the engines,
    and the request goes to the first in it that has at most `slack` requests more than the least loaded. When an engine leaves, only the
    prompts that were at it move, and what is too much for one engine overflows to the same other one. The engine that answered the
    conversation last, which holds more of its prefix than any other, goes before all of that order.

    Args:
        loads: requests in flight by engine; not empty.
        prompt: "" has no affinity.
        last: the engine that answered the conversation last; "" or one that is gone: none.
    """
    least = min(loads.values())
    if balance == "least_loaded" or not prompt:
        return next(name for name, load in loads.items() if load == least)
    free = [name for name, load in loads.items() if load <= least + slack]
    return last if last in free else max(free, key=lambda name: _weight(name, prompt))


def _weight(name: str, prompt: str) -> bytes:
    return blake2b(f"{name}\0{prompt}".encode(), digest_size=8).digest()


class Homes:
    """Which engine answered each conversation last, for the most recent `KEPT_CONVERSATIONS`."""

    def __init__(self) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()

    def note(self, conversation: str, engine: str) -> None:
        """`engine` has answered `conversation`."""
        if not conversation:
            return
        self._engines[conversation] = engine
        self._engines.move_to_end(conversation)
        if len(self._engines) > KEPT_CONVERSATIONS:
            self._engines.popitem(last=False)

    def of(self, conversation: str) -> str:
        """Its name, or ""."""
        return self._engines.get(conversation, "")


class Lengths:
    """How long responses were, by prompt, for the most recent `KEPT_PROMPTS` prompts."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._tokens = self._count = 0

    def note(self, prompt: str, tokens: int) -> None:
        """A response of `tokens` tokens to `prompt` has ended."""
        before, count = self._by_prompt.pop(prompt, (0, 0))
        self._by_prompt[prompt] = before + tokens, count + 1
        self._tokens, self._count = self._tokens + tokens, self._count + 1
        if len(self._by_prompt) > KEPT_PROMPTS:
            _, (old, gone) = self._by_prompt.popitem(last=False)
            self._tokens, self._count = self._tokens - old, self._count - gone

    def expected(self, prompt: str) -> float:
        """Tokens a response to `prompt` will have: the mean of earlier ones to it, else of all, else 0."""
        tokens, count = self._by_prompt.get(prompt, (self._tokens, self._count))
        return tokens / count if count else 0.0


class Waiting:
    """Requests in the order in which they will be let through.

    A request is *overtaken* by one that came later and goes earlier. The oldest goes next, whatever its rank, once as many requests as
    came before it and `patience` more have gone (been taken, or given up). So each is overtaken at most `patience` times, and one that
    finds n waiting is taken after at most n + `patience` others. Proof: let x be overtaken while s requests came before the oldest that
    waits. Then fewer than s + `patience` have gone. Those s are among them, and so is whoever overtook x earlier, who came after x and
    so is none of the s: fewer than `patience`.

    Args:
        patience: at least 0; with 0 the order is first come, first served.
    """

    def __init__(self, order: Order, patience: int, lengths: Lengths) -> None:
        self._order, self._patience, self._lengths = order, patience, lengths
        self._all: OrderedDict[int, ScheduledRequest] = OrderedDict()
        self._continuing: OrderedDict[int, None] = OrderedDict()
        self._new: dict[str, OrderedDict[int, None]] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._all)

    def come(self, request: ScheduledRequest) -> int:
        """Wait; returns the request's ticket: how many came before it."""
        ticket = self._came
        self._came += 1
        self._all[ticket] = request
        line = self._continuing if request.continues else self._new.setdefault(self._line(request), OrderedDict())
        line[ticket] = None
        return ticket

    def take(self) -> int:
        """Let the next one through; there must be one. Returns its ticket."""
        ticket = self._next()
        self.give_up(ticket)
        return ticket

    def give_up(self, ticket: int) -> None:
        """A request that waits no longer wants to."""
        request = self._all.pop(ticket)
        if request.continues:
            del self._continuing[ticket]
            return
        line = self._new[self._line(request)]
        del line[ticket]
        if not line:
            del self._new[self._line(request)]

    def _next(self) -> int:
        oldest = next(iter(self._all))
        gone = self._came - len(self._all)
        if gone >= oldest + self._patience:
            return oldest
        if self._continuing:
            return next(iter(self._continuing))
        return min(((-self._lengths.expected(prompt), next(iter(line))) for prompt, line in self._new.items()))[1]

    def _line(self, request: ScheduledRequest) -> str:
        return request.prompt if self._order == "longest_first" else ""
