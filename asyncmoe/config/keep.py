"""What engines record about sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from asyncmoe.config.fields import Section, Switch


class KeepSection(Section):
    """What engines record about the sampling of each token, so that the trainer reproduces it exactly."""

    routing: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Keep routing: record the experts each token went through in the engine; the trainer sends it through the same experts. auto: on if
    the model has experts."""
    sampling_mask: Annotated[Literal["auto", "on", "off"], Switch] = "auto"
    """Keep the sampling mask: record the ids each token was sampled from; the trainer normalises its probabilities over the same ids. auto:
    on if rollout.top_p, top_k or min_p exclude some. Needs rollout.top_k."""
