"""The model: a checkpoint, or a random model to make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from asyncmoe.config.fields import NameOrPlugin, Positive, Section


class MadeModel(Section):
    """A tiny random model, written to `model.path` if nothing exists there; the path must be below runs/models or run.dir."""

    layers: Positive = 2
    """Decoder layers; each has experts."""
    hidden: Positive = 64
    """Width of a hidden state."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 2
    """Key and value heads; must divide heads."""
    head_dim: Positive = 32
    """Width of a head."""
    experts: Positive = 8
    """Experts per layer."""
    experts_per_token: Positive = 2
    """Experts the router chooses for a token."""
    expert_hidden: Positive = 64
    """Intermediate width of an expert: rows of its gate and up projections."""
    context: Positive = 2048
    """Context length, in tokens."""


class ModelSection(Section):
    """The Hugging Face checkpoint that training starts from."""

    path: Path
    """Directory with config.json, safetensors files and a tokenizer; or a model's id on the Hugging Face hub (org/name), from which it is
    downloaded before anything starts."""
    family: Annotated[str, NameOrPlugin(("auto",))] = "auto"
    """Model family. auto: the one for model_type in config.json; or your own `Family` object (docs/guides/model-family.md)."""
    trust_remote_code: bool = False
    """Run the Python code shipped with the checkpoint; the tokenizers of Kimi-K2 and Moonlight need it."""
    make: MadeModel | None = None
    """Write a tiny random Qwen3-MoE to `path`, below runs/models or run.dir, if nothing exists there; null: no model is made."""
