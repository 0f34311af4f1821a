"""Print samples on a terminal: a group's prompt and its responses, side by side where they fit.

Sampled tokens have the colour of the weight version that sampled them; other tokens are dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from asyncmoe.telemetry.format import number
from asyncmoe.telemetry.samples.index import GroupSample
from asyncmoe.telemetry.samples.records import REJECTED, SampledMember, Trained
from asyncmoe.telemetry.samples.tokens import Gap, TokenView, advantage, shortened, split, tokens_of
from asyncmoe.telemetry.samples.visible import visible

_COLOURS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "bright_cyan", "bright_yellow")
"""Colours of versions in ascending order, repeated."""
_BORDERS = {"trained": "green", "queued": "blue", "dropped": "yellow", "requeued": "yellow", "lost": "yellow", "rejected": "red"}


def show(sample: GroupSample, console: Console, tokens: int) -> None:
    """Print a group.

    Args:
        tokens: maximum tokens shown of a prompt and of a response; the middle of longer ones is left out. 0: all.
    """
    group = sample.group
    every = [tokens_of(group, member, sample.trained.get(member.key)) for member in group.members]
    versions = sorted({token.version for one in every for token in one if isinstance(token, TokenView) and token.version is not None})
    styles = dict(zip(versions, cycle(_COLOURS), strict=False))
    console.print(_title(sample))
    parts = [split(one) for one in every]
    prompt = next((prompt for prompt, _ in parts if prompt), None)
    if prompt is not None:
        body = _text(shortened(prompt, tokens), styles)
        console.print(Panel(body, title="prompt", title_align="left", border_style="dim"))
    if group.answer:
        console.print(Text.assemble(("answer ", "bold"), visible(group.answer)))
    panels = []
    for member, (given, said) in zip(group.members, parts, strict=True):
        own = given if _words(given) != _words(prompt or []) else []
        panels.append(_response(member, own, said, sample.trained.get(member.key), styles, tokens))
    console.print(Columns(panels))
    legend = Text.assemble(("colour: weight version that sampled the token", "dim"))
    for version, style in styles.items():
        legend.append(f" {version}", style=style)
    console.print(legend)


def _title(sample: GroupSample) -> Text:
    entry, group = sample.entry, sample.group
    title = Text.assemble(("group ", "bold"), (str(group.group), "bold"), f" · {entry.outcome}", style=_BORDERS[entry.outcome])
    title.append(f" in step {entry.step}" if entry.step is not None else "")
    title.append(f" · attempt {group.attempt}" if group.attempt else "")
    title.append(f" · {entry.reason}" if entry.reason else "")
    title.append(f" · mean reward {number(entry.reward)}" if entry.reward is not None else "")
    if group.detail:
        title.append(f"\n{visible(group.detail)}", style="default")
    return title


def _response(
    member: SampledMember,
    given: list[TokenView | Gap],
    said: list[TokenView | Gap],
    trained: Trained | None,
    styles: Mapping[int, str],
    most: int,
) -> Panel:
    """Return a response, below its own prompt (`given`) if that differs from the group's prompt."""
    parts: list[RenderableType] = [_text(shortened(given, most), styles), Rule(style="dim")] if given else []
    parts.append(_text(shortened(said, most), styles))
    for call in member.calls:
        named = call.name or "not a valid call"
        line = Text.assemble(("⚙ ", "bold"), visible(f"{named}({call.argument}) → {call.observation}"), f" ({call.seconds:.2f} s)")
        parts.append(line)
    for at, reward in member.rewards:
        parts.append(Text(f"step that ends at token {at}: reward {number(reward)}", style="dim"))
    if member.metrics:
        parts.append(Text(" · ".join(f"{visible(name)} {number(value)}" for name, value in member.metrics.items()), style="dim"))
    if member.why:
        parts.append(Text.assemble(("why ", "bold"), visible(member.why)))
    if member.failure:
        parts.append(Text(visible(member.failure), style="red"))
    parts.append(Text(_figures(member, said, trained), style="dim"))
    return Panel(
        Group(*parts),
        title=Text(_name(member)),
        title_align="left",
        border_style="red" if member.failure else "default",
        expand=False,
    )


def _name(member: SampledMember) -> str:
    reward = "no reward" if member.reward is None else f"reward {number(member.reward)}"
    agent = "" if member.name in ("", "policy") else f" {visible(member.name)}"
    again = f" attempt {member.attempt}" if member.attempt else ""
    return f"response {member.episode}{agent}{again} · {reward}"


def _figures(member: SampledMember, said: Sequence[TokenView | Gap], trained: Trained | None) -> str:
    sampled = [one for one in said if isinstance(one, TokenView) and one.role == "response"]
    count = sum(size for role, size in member.roles if role == "response")
    parts = [f"{count} tokens" if count != 1 else "1 token", *([member.finish] if member.finish else [])]
    parts += [f"begins with {member.forked} tokens of path {member.parent}"] if member.forked else []
    if trained is None:
        return " · ".join(parts)
    parts.append(f"advantage {number(advantage(trained))}")
    differences = [abs(one.trainer - one.engine) for one in sampled if one.trainer is not None and one.engine is not None]
    if differences:
        parts.append(f"|trainer - engine| {number(fmean(differences))}, most {number(max(differences))}")
    rejected = sum(state in REJECTED for state in trained.states)
    parts += [f"{rejected} of {len(trained.states)} tokens rejected"] if rejected else []
    return " · ".join(parts)


def _text(tokens: Sequence[TokenView | Gap], styles: Mapping[int, str]) -> Text:
    text = Text(overflow="fold")
    for one in tokens:
        if isinstance(one, Gap):
            text.append(f" … {one.count} tokens … ", style="reverse dim")
        else:
            style = "dim" if one.version is None else styles[one.version]
            text.append(visible(one.piece).replace("\n", "↵\n"), style=style)
    return text


def _words(tokens: Sequence[TokenView | Gap]) -> list[str | int]:
    return [one.count if isinstance(one, Gap) else one.piece for one in tokens]
