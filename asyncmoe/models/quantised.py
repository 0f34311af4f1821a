"""Block-scaled float8 checkpoints, as published for DeepSeek-V3, Kimi-K2 and Qwen's -FP8. Engines serve the float8 weights and receive
new weights quantised the same way (`asyncmoe.reshard.float8`); the trainer holds the weights in its own dtype.

Source: sglang 0.5.23: the methods of quantization/fp8.py apply to linear layers and fused experts, but not to routers, embeddings, the
output layer and norms (models/*.py give them no `quant_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncmoe.errors import ConfigError
from asyncmoe.reshard.float8 import BLOCK

KEY = "quantization_config"
"""Key of config.json."""
_LINEARS = frozenset({"q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b", "gate", "up", "down"})
"""Last components of the names of quantised canonical tensors."""
_WANTED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": (None, "float", "ue8m0"),
}
_LEFT = ("lm_head", "embed_tokens", "norm", "layernorm", "gate", "e_score_correction_bias")
"""Name suffixes of modules that no engine quantises, whether or not a checkpoint lists them."""


@dataclass(frozen=True)
class Float8:
    """The block scaling of a checkpoint.

    Attributes:
        power_of_two: scales are powers of two.
    """

    power_of_two: bool


def quantised(tensor: str) -> bool:
    """Return whether a canonical tensor, named with or without its layer, is quantised."""
    return tensor.rpartition(".")[2] in _LINEARS


def float8_of(hf: Mapping[str, Any]) -> Float8 | None:
    """Return the block scaling of a model's weights; None if they are not quantised.

    Raises:
        ConfigError: the quantisation is not float8 in blocks of 128 x 128.
    """
    given = hf.get(KEY)
    if given is None:
        return None
    for key, carried in _WANTED.items():
        if given.get(key) not in carried:
            words = " or ".join(repr(one) for one in carried if one is not None)
            expected = f"{words}, as for float8 in blocks"
            raise ConfigError(f"{KEY}.{key} in config.json", got=repr(given.get(key)), expected=expected)
    for module in given.get("ignored_layers") or given.get("modules_to_not_convert") or ():
        if not str(module).endswith(_LEFT):
            raise ConfigError(f"{KEY} in config.json", got=f"{module} unquantised", expected="every linear layer except routers quantised")
    return Float8(power_of_two=given.get("scale_fmt") == "ue8m0")


def without(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the same model without quantisation, in the trainer's dtype."""
    return {key: value for key, value in hf.items() if key != KEY}
