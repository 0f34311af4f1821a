"""The small model and batch for testing every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncmoe.config import Config
from asyncmoe.trajectory import Trajectory
from tests import families
from tests.configs import minimal
from tests.unit.kept_trajectory import sampled

VERSION = 5
TEMPERATURE = 0.8
STEPS = 3
LR = 1e-3
EPS = 1e-6
BIAS_RATE = 0.01
CLIP_GRAD = 0.5
WEIGHT_DECAY = 0.5
VOCAB = 96
LENGTHS = (5, 17, 9, 12, 4, 21, 30)
PROMPTS = (2, 6, 3, 5, 1, 4, 10)
REWARDS = (1.0, 0.0, 0.5, 1.0, 0.0, 0.25, 1.0)
GROUPS = (0, 0, 0, 0, 1, 1, 1)
CREDIT = {"process": {"weight": 0.7}, "distill": {"weight": 0.4, "clip": 0.5}}
OBJECTIVE = {"clip_low": 0.1, "clip_high": 0.15, "correction": {"cap": 1.1}, "aggregation": "sequence_mean", "updates_per_batch": 2}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
_QWEN3 = families.sized(_SIZES, "qwen3")
# Four experts, so that two expert-parallel ranks have several each: on a CPU the time of a step is that of its operations.
_QWEN3_MOE = {**families.sized(_SIZES, "qwen3_moe"), "num_experts": 4, "output_router_logits": False, "router_aux_loss_coef": 0.0}
_GLM = families.sized(_SIZES, "glm")

FAMILIES = [name for name in families.MODELS if name not in ("qwen3", "qwen3_moe")]
"""Those besides Qwen's, of which there are more variants."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": _QWEN3_MOE,
    # The output layer is the embedding (the last pipeline stage has a copy), one layer is dense, chosen experts' weights do not sum to 1.
    "tied": {**_QWEN3_MOE, "tie_word_embeddings": True, "mlp_only_layers": [1], "norm_topk_prob": False},
    "dense": _QWEN3,
    "dense-tied": {**_QWEN3, "tie_word_embeddings": True},
    "llama-tied": {
        **families.sized(_SIZES, "llama"),
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
    **{name: families.sized(_SIZES, name) for name in FAMILIES},
    # An epsilon that is seen, see `families.with_one_eps`.
    "moonlight": {**families.sized(_SIZES, "moonlight"), "rms_norm_eps": 1e-3},
    "glm-air": {**_GLM, "use_qk_norm": False, "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0},
}
"""Models that layouts are tried on; every family is among them."""


def variants(sizes: Mapping[str, int]) -> list[str]:
    """Those that a layout can be tried on: a model without experts cannot be spread over expert-parallel ranks."""
    return [name for name, model in VARIANTS.items() if sizes.get("ep", 1) == 1 or model["model_type"] not in families.DENSE]


def settings_of(layout: str) -> dict[str, Any]:
    """ "tp=2,recompute=full" -> {"tp": 2, "recompute": "full"}"""
    parts = (part.partition("=") for part in layout.split(","))
    return {key: int(value) if value.isdecimal() else value for key, _, value in parts}


def hf_config(variant: str) -> Any:
    """Its configuration."""
    from transformers import AutoConfig

    model = VARIANTS[variant]
    return AutoConfig.for_model(model["model_type"], **{key: value for key, value in model.items() if key != "model_type"})


def tokens() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]


def trajectories(behaviour: Sequence[np.ndarray]) -> dict[int, Trajectory]:
    """The batch. Even trajectories are pure and of the trainer's version; odd ones are older. Every third sampled token ends a step, worth
    0, 1 or 2; the third trajectory has one of 0.5 only. `behaviour[i]`: float32[T_i]."""
    made, rng = {}, np.random.default_rng(3)
    for i, ids in enumerate(tokens()):
        mask = np.arange(len(ids)) >= PROMPTS[i]
        mask[-2] &= i != 5  # an observation token in the middle of the response
        ends = mask & (np.arange(len(ids)) % 3 == i % 3) if i != 2 else np.arange(len(ids)) == 7
        worth = np.where(ends, rng.integers(0, 3, len(ids)) if i != 2 else 0.5, np.nan).astype(np.float32)
        teacher = np.where(mask, np.minimum(behaviour[i] + rng.normal(0, 0.5, len(ids)), 0), 0).astype(np.float32)
        version = VERSION if i % 2 == 0 else VERSION - 1 - i % 3
        more = {"reward": REWARDS[i], "prefix_version": version, "rewards": worth, "teacher": teacher}
        made[i] = sampled(ids, mask, behaviour[i], version, GROUPS[i], i, **more)
    return made


def config(path: Path, run: Path | None = None, **trainer: Any) -> Config:
    """The configuration of a trainer; `optimizer` in `trainer` is merged into the case's own, which has whole gradients on every rank.
    run: the run's directory, if not "run" beside the model."""
    adam = {"lr": LR, "eps": EPS, "betas": [0.9, 0.95], "clip_grad": CLIP_GRAD, "weight_decay": WEIGHT_DECAY, "distributed": False}
    adam |= trainer.pop("optimizer", {})
    trainer = {"tokens_per_microbatch": 32, "timeout_s": 60, "optimizer": adam} | trainer
    return minimal(run or path / "run", path / "hf", STEPS, rollout={"temperature": TEMPERATURE}, objective=OBJECTIVE, trainer=trainer)
