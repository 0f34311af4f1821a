"""Checkpoints of float8 in blocks, as DeepSeek-V3, Kimi-K2 and Qwen's -FP8 are published: engines serve them as they are, and get new
weights quantised the same way (`asyncmoe.reshard.float8`); the trainer has them in its own dtype.

Source: sglang 0.5.23: the methods of quantization/fp8.py belong to linear layers and to fused experts; routers, embeddings, the output
layer and norms have none (models/*.py give them no `quant_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.reshard.float8 import BLOCK

KEY = "quantization_config"
"""Of config.json."""
_LINEARS = frozenset({"q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate", "up", "down"})
"""Last parts of the names of canonical tensors."""
_WANTED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": (None, "float", "ue8m0"),
}
_LEFT = ("lm_head", "embed_tokens", "norm", "layernorm", "gate", "e_score_correction_bias")
"""What ends the names of modules that no engine quantises, whatever a checkpoint says of them."""


@dataclass(frozen=True)
class Float8:
    """How the blocks of a checkpoint are scaled.

    Attributes:
        power_of_two: scales are powers of two.
    """

    power_of_two: bool


def quantised(tensor: str) -> bool:
    """Of a canonical tensor, named with or without its layer."""
    return tensor.rpartition(".")[2] in _LINEARS


def float8_of(hf: Mapping[str, Any]) -> Float8 | None:
    """How a model's weights are quantised; None where they are not.

    Raises:
        ConfigError: in another way than blocks of 128 x 128.
    """
    given = hf.get(KEY)
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{KEY} in config.json", got=repr(given), expected="an object, or nothing")
    for key, carried in _WANTED.items():
        if given.get(key) not in carried:
            words = " or ".join(repr(one) for one in carried if one is not None)
            expected = f"{words}, as blocks of float8 have it"
            raise ConfigError(f"{KEY}.{key} in config.json", got=repr(given.get(key)), expected=expected)
    for module in given.get("ignored_layers") or given.get("modules_to_not_convert") or ():
        if not str(module).endswith(_LEFT):
            raise ConfigError(f"{KEY} in config.json", got=f"{module} left as it is", expected="every linear layer but routers quantised")
    return Float8(power_of_two=given.get("scale_fmt") == "ue8m0")


def without(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the same model in the trainer's dtype."""
    return {key: value for key, value in hf.items() if key != KEY}
