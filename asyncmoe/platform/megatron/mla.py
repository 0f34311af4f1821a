"""Patch of latent attention for a missing Transformer Engine."""

from __future__ import annotations

from asyncmoe.platform.megatron.patch import module, replace


def install() -> None:
    """Clear `HAVE_TE` in `multi_latent_attention.py`, which is set because its import yields stand-ins; `isinstance` with one of them
    raises."""
    replace(module("transformer.multi_latent_attention"), "HAVE_TE", False)
