"""What latent attention in an engine needs on a machine without CUDA; see `cpu`.

The modules in question are imported by servers of such models, so each is patched when it is.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from asyncmoe.platform.sglang.cpu_lora import after_import
from asyncmoe.platform.sglang.standin import PatchTargetGone

HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
ROPE = "sglang.srt.layers.rotary_embedding.factory"


def install() -> None:
    """Have the modules patched as soon as they are imported."""
    after_import(HANDLERS, _absorbed)
    after_import(ROPE, _plain_positions)


def _absorbed(module: ModuleType) -> None:
    """The first tokens of a prompt go through keys and values of every head, which this backend does not look at: it attends to what is
    in its cache, and that is the small vectors. Where their size is that of a head the result is wrong in silence, else it is an error. Let
    all tokens be computed as the later ones are, on the small vectors."""
    registry, methods = getattr(module, "AttentionBackendRegistry", None), getattr(module, "AttnForwardMethod", None)
    if not hasattr(registry, "register") or not hasattr(methods, "MLA"):
        raise PatchTargetGone(f"{module.__name__}.AttentionBackendRegistry or AttnForwardMethod.MLA is gone")
    vars(module)["AttentionBackendRegistry"].register("torch_native", lambda *_: vars(module)["AttnForwardMethod"].MLA)


def _plain_positions(module: ModuleType) -> None:
    """`get_rope_cpu` asserts that positions are scaled as DeepSeek's are; those that are not scaled are computed as in other models."""
    scaled, plain = getattr(module, "get_rope_cpu", None), getattr(module, "get_rope", None)
    if scaled is None or plain is None:
        raise PatchTargetGone(f"{module.__name__}.get_rope_cpu or get_rope is gone")

    def get_rope_cpu(
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        known = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
        return plain(*known) if rope_scaling is None else scaled(*known, device)

    vars(module)["get_rope_cpu"] = get_rope_cpu
