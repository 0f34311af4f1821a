"""Selects the next request and its engine. Decisions only: nothing here waits or communicates.

Next request (`Waiting`): requests that continue an episode (a response cut short by a weight update, or a later turn), and those of an
evaluation, go before new requests, so that the end of an episode never waits for the start of another. With order "longest_first", new
requests with the longest expected responses go first, because a long response that starts last holds up the whole batch (longest processing
time first; Graham, 1969). With order "probes_first", the first request to each unknown prompt goes before all other new requests. Responses
to one prompt have similar lengths, so the first one predicts the rest before most of them start (Qin et al., Seer, arXiv 2511.14617,
section 3.3). The remaining new requests follow, longest first; unknown lengths count as longest. No request starves: each is overtaken at
most `patience` times.

Engine (`choose`): the one with the fewest requests; but a request that continues a conversation goes to the engine that has it cached,
unless that engine is much busier than the others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from asyncmoe.config.rollout import Order

T = TypeVar("T")
Place = TypeVar("Place", str, int)
PATIENCE = 4
"""The pool lets a request be overtaken at most `PATIENCE * limit` times: a request goes out of order only after several responses' time."""
_CONTINUES, _PROBE, _NEW = range(3)
KEPT_PROMPTS = 1024
"""Number of most recent prompts whose lengths `Lengths` remembers."""
KEPT_CONVERSATIONS = 65536
"""Number of most recent conversations whose engines the pool remembers."""


@dataclass(frozen=True)
class ScheduledRequest:
    """Scheduling information of a request.

    Attributes:
        prompt: name of the episode's prompt; responses to the same prompt have similar lengths.
        continues: True if its episode has been at an engine before, or goes ahead as if it had.
        sampled: number of tokens of the same response that earlier requests sampled.
        conversation: name of the conversation it continues or begins: one agent's part in an episode. "": none.
        partial: True if the response continues after it reaches the request's `max_new_tokens`.
    """

    prompt: str = ""
    continues: bool = False
    sampled: int = 0
    conversation: str = ""
    partial: bool = False


UNKNOWN = ScheduledRequest()


def choose(loads: Mapping[Place, int], last: Place | None = None) -> Place:
    """Return the engine for a request: the one that last answered its conversation, unless its requests exceed those of the least loaded
    engine by over a quarter and by more than 2; else the least loaded engine. Its group of ranks (`engines.dp_attention`) is chosen by the
    same rule.

    Args:
        loads: requests in flight by engine, or by group; not empty.
        last: engine or group that last answered the conversation; ignored if it is None or gone.
    """
    least = min(loads, key=loads.__getitem__)
    return last if last is not None and last in loads and loads[last] <= loads[least] + max(2, loads[least] // 4) else least


class Recent(OrderedDict[str, T]):
    """A mapping that keeps only the `most` entries set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: str, value: T) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Lengths:
    """Response lengths by prompt, for the `KEPT_PROMPTS` most recent prompts."""

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        """Tokens of all responses, their number, and the tokens of the longest."""
        self._tokens = self._count = 0

    def note(self, prompt: str, tokens: int) -> None:
        """Record a finished response of `tokens` tokens to `prompt`."""
        before, count, longest = self._by_prompt.pop(prompt, (0, 0, 0))
        self._by_prompt[prompt] = before + tokens, count + 1, max(tokens, longest)
        self._tokens, self._count = self._tokens + tokens, self._count + 1
        if len(self._by_prompt) > KEPT_PROMPTS:
            _, (old, gone, _) = self._by_prompt.popitem(last=False)
            self._tokens, self._count = self._tokens - old, self._count - gone

    def expected(self, prompt: str) -> float:
        """Return the expected tokens of a response to `prompt`: the mean of earlier responses to it, else of all responses, else 0."""
        tokens, count, _ = self._by_prompt.get(prompt, (self._tokens, self._count, 0))
        return tokens / count if count else 0.0

    def longest(self, prompt: str) -> float:
        """Return the most tokens of an earlier response to `prompt`; inf if there was none."""
        return self._by_prompt.get(prompt, (0, 0, math.inf))[2]


class Waiting:
    """Waiting requests, taken in scheduling order.

    A request is *overtaken* by a request that arrived later and leaves earlier. Let s be the number of requests that arrived before the
    oldest waiting request. The oldest goes next, whatever its rank, once s + `patience` requests have left (taken or given up). So each
    request is overtaken at most `patience` times, and a request that finds n others waiting is taken after at most n + `patience`. Proof:
    when a request x is overtaken, fewer than s + `patience` requests have left. Among them are the s requests, and the requests that
    overtook x earlier. These arrived after x, so none of them is among the s: there are fewer than `patience` of them.

    Args:
        patience: at least 0; with 0 the order is first come, first served.
    """

    def __init__(self, order: Order, patience: int, lengths: Lengths) -> None:
        self._order, self._patience, self._lengths = order, patience, lengths
        self._all: OrderedDict[int, tuple[int, str]] = OrderedDict()
        """Each ticket's line: the line for continuing requests, for probes, or for new requests to a prompt (with fifo, to any prompt)."""
        self._lines: dict[tuple[int, str], OrderedDict[int, None]] = {}
        self._probed = Recent[None](KEPT_PROMPTS)
        self._came = 0

    def __len__(self) -> int:
        return len(self._all)

    def come(self, request: ScheduledRequest) -> int:
        """Add a request; return its ticket, the number of requests that arrived before it."""
        ticket = self._came
        self._came += 1
        kind = _CONTINUES if request.continues else _PROBE if self._is_probe(request.prompt) else _NEW
        line = self._all[ticket] = kind, request.prompt if kind == _NEW and self._order != "fifo" else ""
        self._lines.setdefault(line, OrderedDict())[ticket] = None
        return ticket

    def take(self) -> int:
        """Remove the next request and return its ticket; at least one must be waiting."""
        ticket = self._next()
        self.give_up(ticket)
        return ticket

    def give_up(self, ticket: int) -> None:
        """Remove a waiting request."""
        line = self._all.pop(ticket)
        del self._lines[line][ticket]
        if not self._lines[line]:
            del self._lines[line]

    def _next(self) -> int:
        oldest = next(iter(self._all))
        gone = self._came - len(self._all)
        if gone >= oldest + self._patience:
            return oldest
        for first in ((_CONTINUES, ""), (_PROBE, "")):
            if first in self._lines:
                return next(iter(self._lines[first]))
        length = self._lengths.longest if self._order == "probes_first" else self._lengths.expected
        return min((-length(prompt), next(iter(line))) for (_, prompt), line in self._lines.items())[1]

    def _is_probe(self, prompt: str) -> bool:
        """Return whether a new request is the first to a prompt without known lengths, and mark the prompt as probed."""
        if self._order != "probes_first" or not prompt or prompt in self._probed or self._lengths.longest(prompt) < math.inf:
            return False
        self._probed[prompt] = None
        return True
