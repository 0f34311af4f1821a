"""Colours of tokens on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rich.color import Color
from rich.style import Style

from asyncmoe.telemetry.samples.records import CAPPED, CLIPPED, REJECTED, TRAINED
from asyncmoe.telemetry.samples.tokens import TokenView

Colour = Literal["version", "logprob", "ratio", "mask", "mismatch"]

GIVEN = Style(dim=True)
_VERSIONS = ("cyan", "yellow", "magenta", "green", "bright_blue", "bright_red", "bright_cyan", "bright_yellow")
_RAMP = (86, 190, 120), (225, 190, 80), (230, 90, 80)
_DIVERGING = (90, 150, 240), (200, 200, 200), (230, 90, 80)
_LEAST = 6.0
"""Nats at the end of the colour scale of log-probabilities: a probability of 0.25 %."""
_MOST = math.log(2.0)
"""Log-ratio at the end of the colour scale of ratios."""
_STATES = {TRAINED: Style(color="green"), CLIPPED: Style(color="yellow"), CAPPED: Style(color="cyan")}
_REJECTED = Style(color="red", strike=True)

LEGENDS: dict[Colour, str] = {
    "version": "colour: weight version that sampled the token",
    "logprob": f"colour: log-probability in the engine, from 0 (green) to -{_LEAST:g} (red)",
    "ratio": "colour: exp(trainer - engine): 1 is grey, above 1 red, below 1 blue, strongest at 2 and 1/2",
    "mask": "colour: green trained, yellow clipped, cyan trained with a capped weight, red struck out rejected",
    "mismatch": "colour: share of layers whose router would have sent the token elsewhere, from none (green) to all (red)",
}


def style_of(token: TokenView, colour: Colour, versions: Sequence[int], layers: int) -> Style:
    """Return the style of a token; tokens that were given, not sampled, are dim.

    Args:
        versions: all versions of the displayed tokens, ascending: neighbours differ in colour.
        layers: number of layers with experts.
    """
    if token.role != "response":
        return GIVEN
    if colour == "version":
        return Style() if token.version is None else version_style(versions.index(token.version))
    if colour == "mask":
        return _REJECTED if token.state in REJECTED else _STATES.get(token.state, Style())
    if colour == "logprob":
        return Style() if token.engine is None else _between(-token.engine / _LEAST, _RAMP)
    if colour == "ratio":
        return Style() if token.ratio is None else _between(0.5 + 0.5 * math.log(token.ratio) / _MOST, _DIVERGING)
    return Style() if token.mismatch is None or not layers else _between(token.mismatch / layers, _RAMP)


def version_style(place: int) -> Style:
    """Return the style of a version, by its index among those displayed."""
    return Style(color=_VERSIONS[place % len(_VERSIONS)])


def _between(share: float, ramp: tuple[tuple[int, int, int], ...]) -> Style:
    """Return the colour at `share`, from 0 to 1, of a ramp of three."""
    place = 2 * min(max(share, 0.0), 1.0)
    first = 0 if place < 1 else 1
    pairs = zip(ramp[first], ramp[first + 1], strict=True)
    return Style(color=Color.from_rgb(*(round(a + (b - a) * (place - first)) for a, b in pairs)))
