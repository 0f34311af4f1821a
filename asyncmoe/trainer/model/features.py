"""Derives from a run's configuration the features that decide Megatron's switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.config import Config
from asyncmoe.models import family_of, kept_routing
from asyncmoe.models.latent import Latent
from asyncmoe.trainer.model.switches import RunFeatures


def run_features(hf: Mapping[str, Any], config: Config, float32: bool) -> RunFeatures:
    """Return the features that `switches.decide` takes.

    Args:
        hf: the model's config.json.
        float32: whether the trainer's weights are float32.
    """
    family, expert_widths = family_of(hf), tuple[int, ...]()
    shape = family.shape_of(hf)
    if shape.experts:
        rank = () if config.adapter is None else (config.adapter.rank,)
        expert_widths = (shape.hidden, shape.expert_width // config.trainer.expert_tp, *rank)
    return RunFeatures(
        expert_widths=expert_widths,
        lora=config.adapter is not None,
        keeps_routing=kept_routing(config, hf) is not None,
        latent=isinstance(shape.attention, Latent),
        interleaved_rope=bool(family.megatron_config(hf)[0].get("rotary_interleaved")),
        float32=float32,
        published_every=config.sync.every,
    )
