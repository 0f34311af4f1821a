"""The page's samples: which groups it has, and each group's responses with a value of every kind for each token.

Texts are made harmless here (`samples.visible`), and the page sets them as text, never as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from asyncmoe.telemetry.samples.index import Entry, GroupSample, Index
from asyncmoe.telemetry.samples.plain import advantage
from asyncmoe.telemetry.samples.records import REJECTED, SampledMember
from asyncmoe.telemetry.samples.tokens import Gap, TokenView, shortened, tokens_of
from asyncmoe.telemetry.samples.visible import visible

MOST_TEXT = 20_000
"""Characters of a prompt, of what a scorer says, of a call's argument and of its observation."""
_NEWEST = 20
_ROLES = {"prompt": "p", "response": "r", "observation": "o"}
Values = Sequence[float | None] | None
"""A value for each token; None: for no token."""


@dataclass(frozen=True)
class Head:
    """A kept group in the page's list. `place`: its place in `Index.entries`; `versions`: oldest and newest of its tokens."""

    place: int
    group: int
    attempt: int
    outcome: str
    reason: str
    step: int | None
    versions: tuple[int, int] | None
    reward: float | None
    members: int


@dataclass(frozen=True)
class Tokens:
    """The tokens after a prompt, a value of each list for each. roles: p, r, o for prompt, response and observation, g for tokens left out,
    whose text says how many. states: as `samples.records.Trained.states`, a blank where nothing is known."""

    texts: Sequence[str]
    ids: Sequence[int | None]
    roles: str
    versions: Values
    engine: Values
    trainer: Values
    advantages: Values
    weights: Values
    teacher: Values
    mismatch: Values
    states: str


@dataclass(frozen=True)
class ShownCall:
    """A call of a tool."""

    name: str
    argument: str
    observation: str
    seconds: float


@dataclass(frozen=True)
class ShownResponse:
    """An agent's part in an episode. prompt: its own, if it is not the group's; layers: those with experts, for the routing mismatch."""

    episode: int
    attempt: int
    agent: str
    prompt: str | None
    reward: float | None
    rewards: Sequence[tuple[int, float]]
    advantage: float | None
    finish: str
    sampled: int
    why: str
    failure: str
    calls: Sequence[ShownCall]
    layers: int
    tokens: Tokens


@dataclass(frozen=True)
class GroupPage:
    """A group with its responses. rules: the rule behind each letter of a rejected token."""

    head: Head
    question: str
    answer: str
    detail: str
    prompt: str
    responses: Sequence[ShownResponse]
    rules: dict[str, str]


def heads(found: Index, places: Sequence[int]) -> list[Head]:
    """Return the groups at these places of an index."""
    return [_head(place, found.entries[place]) for place in places]


def by_interest(count: int) -> Iterator[int]:
    """Yield all places below `count`, so that any first few are a good choice: the newest ones, then ever denser over the whole run."""
    older = max(count - _NEWEST, 0)
    yield from range(count - 1, older - 1, -1)
    bits = max(older - 1, 0).bit_length()
    yield from (place for i in range(1 << bits) if (place := int(f"{i:0{bits}b}"[::-1] or "0", 2)) < older)


def group_page(sample: GroupSample, place: int, most: int = 0) -> GroupPage:
    """Return a group as the page shows it.

    Args:
        place: its place in `Index.entries`.
        most: tokens of a response, from both ends; 0: all that are kept.
    """
    every = [tokens_of(sample.group, member, sample.trained.get(member.key)) for member in sample.group.members]
    prompts = [_text(_prompt(tokens)) for tokens in every]
    prompt = next((text for text in prompts if text), "")
    parts = zip(sample.group.members, every, prompts, strict=True)
    responses = [_response(sample, member, tokens, None if text == prompt else text, most) for member, tokens, text in parts]
    group = sample.group
    texts = (_clean(group.question), _clean(group.answer), _clean(group.detail))
    return GroupPage(_head(place, sample.entry), *texts, prompt, responses, dict(REJECTED))


def _head(place: int, entry: Entry) -> Head:
    versions = (min(entry.versions), max(entry.versions)) if entry.versions else None
    reason = _clean(entry.reason)
    return Head(place, entry.group, entry.attempt, entry.outcome, reason, entry.step, versions, _short(entry.reward), entry.members)


def _response(sample: GroupSample, member: SampledMember, tokens: list[TokenView | Gap], prompt: str | None, most: int) -> ShownResponse:
    trained = sample.trained.get(member.key)
    said = shortened(tokens[len(_prompt(tokens)) :], most)
    return ShownResponse(
        episode=member.episode,
        attempt=member.attempt,
        agent=_clean(member.name),
        prompt=prompt,
        reward=_short(member.reward),
        rewards=[(at, float(f"{reward:.6g}")) for at, reward in member.rewards],
        advantage=_short(advantage(trained)),
        finish=_clean(member.finish),
        sampled=sum(count for role, count in member.roles if role == "response"),
        why=_clean(member.why),
        failure=_clean(member.failure),
        calls=[
            ShownCall(_clean(one.name or "not a valid call"), _clean(one.argument), _clean(one.observation), one.seconds)
            for one in member.calls
        ],
        layers=0 if trained is None else trained.layers,
        tokens=_tokens(said),
    )


def _prompt(tokens: Sequence[TokenView | Gap]) -> Sequence[TokenView | Gap]:
    """Return the tokens before the first response."""
    first = next((i for i, one in enumerate(tokens) if one.role != "prompt"), len(tokens))
    return tokens[:first]


def _text(tokens: Sequence[TokenView | Gap]) -> str:
    return _clean("".join(_gap(one) if isinstance(one, Gap) else one.piece for one in tokens))


def _tokens(said: Sequence[TokenView | Gap]) -> Tokens:
    views = [None if isinstance(one, Gap) else one for one in said]

    def values(name: str) -> Values:
        found = [None if view is None else _short(getattr(view, name)) for view in views]
        return found if any(value is not None for value in found) else None

    return Tokens(
        texts=[_gap(one) if isinstance(one, Gap) else visible(one.piece) for one in said],
        ids=[None if view is None else view.id for view in views],
        roles="".join("g" if isinstance(one, Gap) else _ROLES[one.role] for one in said),
        versions=values("version"),
        engine=values("engine"),
        trainer=values("trainer"),
        advantages=values("advantage"),
        weights=values("weight"),
        teacher=values("teacher"),
        mismatch=values("mismatch"),
        states="".join(" " if view is None else view.state or " " for view in views),
    )


def _gap(gap: Gap) -> str:
    return f" … {gap.count} tokens … "


def _clean(text: str) -> str:
    """Return a text without harmful characters; of a long one, the middle is left out."""
    if len(text) > MOST_TEXT:
        half = MOST_TEXT // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    return visible(text)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
