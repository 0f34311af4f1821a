"""Which mixture follows from a dense model, and from where each of its tensors comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from asyncmoe.errors import ConfigError, UserError
from asyncmoe.models.attention import Grouped
from asyncmoe.models.families import FAMILIES, family_of
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.shape import HfConfig, Shape, rope

Kind = Literal["mixtral", "qwen3_moe", "glm4_moe"]
ROUTER_STD = 0.02
"""Standard deviation of a router's weights if the model has no initializer_range; transformers' default."""
_KEPT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act",
    "rms_norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Upcycling:
    """The mixture that is asked for.

    Attributes:
        experts: experts of each layer from which a router chooses.
        top_k: how many it chooses.
        shared: experts that all tokens pass; the dense MLP is cut into shared + 1 parts, of which they have all but one.
        kind: model_type of the mixture; None: the simplest that computes what the dense model does.
        seed: of the routers' weights, and of whatever else is drawn.
    """

    experts: int
    top_k: int
    shared: int = 0
    kind: Kind | None = None
    seed: int = 0


@dataclass(frozen=True)
class CopiedFrom:
    """Where a tensor of the mixture comes from: units [first, first + count) of the dense model's tensor, counted along its intermediate
    dimension, or the whole tensor (`count` 0). `tensor` None: the tensor is new."""

    tensor: str | None
    first: int = 0
    count: int = 0


def settings(dense: HfConfig, wanted: Upcycling) -> dict[str, Any]:
    """Return the configuration (config.json) of the mixture.

    Raises:
        ConfigError: the dense model has experts or a feature that no mixture has, or sizes do not divide.
    """
    m = _checked(dense, wanted)
    kind = wanted.kind or _simplest(m, wanted)
    width = m.dense_width // (wanted.shared + 1)
    attention = m.attention
    if not isinstance(attention, Grouped):
        raise ConfigError("model_type in config.json", got=dense["model_type"], expected="a dense model with grouped-query attention")
    values = {key: dense[key] for key in _KEPT if dense.get(key) is not None}
    values |= {"model_type": kind, "architectures": [_ARCHITECTURES[kind]], "tie_word_embeddings": False, "num_key_value_heads": m.kv_heads}
    values |= {"head_dim": m.head_dim, "rope_parameters": rope(dense), "num_experts_per_tok": wanted.top_k}
    match kind:
        case "mixtral":
            values |= {"intermediate_size": width, "num_local_experts": wanted.experts, "sliding_window": None, "router_jitter_noise": 0.0}
        case "qwen3_moe":
            values |= {"moe_intermediate_size": width, "intermediate_size": m.dense_width, "num_experts": wanted.experts}
            values |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        case "glm4_moe":
            values |= {"moe_intermediate_size": width, "intermediate_size": m.dense_width, "n_routed_experts": wanted.experts}
            values |= {"n_shared_experts": wanted.shared, "first_k_dense_replace": 0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1}
            values |= {"routed_scaling_factor": 1.0, "use_qk_norm": attention.qk_norm, "attention_bias": attention.bias}
            values |= {"partial_rotary_factor": attention.rotary, "num_nextn_predict_layers": 0}
            values["rope_parameters"] = {**values["rope_parameters"], "partial_rotary_factor": attention.rotary}
    _check_same(m, values, wanted)
    return values


_ARCHITECTURES: Mapping[Kind, str] = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}


def kind_named(name: str) -> Kind | None:
    """Return the kind of this name; None for "auto".

    Raises:
        UserError: there is no such kind.
    """
    if name == "auto":
        return None
    if name not in _ARCHITECTURES:
        raise UserError("--kind", got=name, expected=f"auto, {', '.join(_ARCHITECTURES)}")
    return cast(Kind, name)


def source(tensor: str, dense: Shape, mixture: Shape) -> CopiedFrom:
    """Return where a canonical tensor of the mixture comes from."""
    inner = tensor.split(".", 2)[-1]
    if inner in ("router", "router_bias"):
        return CopiedFrom(None)
    if tensor == "head" and dense.tied:
        return CopiedFrom("embed")
    front = tensor.removesuffix(inner)
    if inner.startswith("shared."):
        return CopiedFrom(front + inner.removeprefix("shared."), 0, mixture.shared_width)
    if inner.startswith("experts."):
        return CopiedFrom(front + inner.rpartition(".")[2], mixture.shared_width, mixture.expert_width)
    return CopiedFrom(tensor)


def _checked(dense: HfConfig, wanted: Upcycling) -> Shape:
    if dense.get("model_type") not in FAMILIES:
        raise ConfigError("model_type in config.json", got=repr(dense.get("model_type")), expected="llama or qwen3, a dense model")
    family = family_of(dense)
    m = family.shape_of(dense)
    if m.experts:
        got = f"{family.name}, a mixture of {counted(m.experts, 'expert')}"
        raise ConfigError("model_type in config.json", got=got, expected="a dense model; a mixture is not upcycled again")
    if dense.get("quantization_config"):
        raise ConfigError("quantization_config in config.json", got="a quantised model", expected="one in float32, bfloat16 or float16")
    family.check(dense, MegatronParallel(), EngineParallel())
    if wanted.top_k < 1 or wanted.experts < wanted.top_k:
        raise ConfigError("--top-k", got=wanted.top_k, expected=f"1 to --experts = {wanted.experts}")
    if wanted.shared < 0 or m.dense_width % (wanted.shared + 1):
        expected = f"a count so that count + 1 divides intermediate_size = {m.dense_width} of the dense model, into equal experts"
        raise ConfigError("--shared", got=wanted.shared, expected=expected)
    return m


def counted(count: int, noun: str) -> str:
    """Return "1 expert", "2 experts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _simplest(m: Shape, wanted: Upcycling) -> Kind:
    if wanted.shared:
        return "glm4_moe"
    return "qwen3_moe" if "q_norm" in m.attention.shapes(m) else "mixtral"


def _check_same(dense: Shape, values: dict[str, Any], wanted: Upcycling) -> None:
    """Refuse a mixture that has not the dense model's attention, so that it could not compute the same."""
    if values["model_type"] == "glm4_moe" and not wanted.shared:
        raise ConfigError(
            "--kind", got="glm4_moe without --shared", expected="--shared 1 or more, or another kind", hint="leave --kind out"
        )
    family = FAMILIES[values["model_type"]]
    m = family.shape_of(values)
    if (bool(wanted.shared), m.attention.shapes(m).keys()) != (bool(m.shared_width), dense.attention.shapes(dense).keys()):
        ours, theirs = sorted(m.attention.shapes(m)), sorted(dense.attention.shapes(dense))
        got = f"{family.name}, whose attention has {', '.join(ours)}, {'some' if m.shared_width else 'no'} shared experts"
        expected = f"a mixture with {', '.join(theirs)}, as the dense model has, and {counted(wanted.shared, 'shared expert')}"
        raise ConfigError("--kind", got=got, expected=expected, hint="leave --kind out")
    family.check(values, MegatronParallel(), EngineParallel())
