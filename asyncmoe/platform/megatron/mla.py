"""Latent attention without Transformer Engine."""

from __future__ import annotations

from asyncmoe.platform.megatron.patch import module, replace


def install() -> None:
    """Say that there is no Transformer Engine where `multi_latent_attention.py` believes there is: its import gave stand-ins, and
    `isinstance` of one of them raises."""
    replace(module("transformer.multi_latent_attention"), "HAVE_TE", False)
