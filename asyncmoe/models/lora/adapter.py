"""Adapters: the pairs of low-rank matrices of a model, their canonical names and shapes, and the form that SGLang loads.

A pair is A [rank, in] and B [out, rank] of one linear layer, y = W x + (alpha / rank) B A x. A *half* is either matrix:

    layers.3.q_proj.a                    attention, and the MLP of a layer without experts
    layers.3.shared.gate_proj.b          the shared experts
    layers.3.experts.7.gate_proj.b       one expert
    layers.3.experts.shared.gate_proj.a  all experts of the layer (`shared_outer`: the halves on the side of the hidden states)

Halves are numpy arrays. numpy has no bfloat16, so bfloat16 values are held as their uint16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from asyncmoe.config.lora import ATTENTION, MLP, TARGETS, LoraSection
from asyncmoe.models.shape import Shape, Shapes, layer_shapes

OUTER = {"gate_proj": "a", "up_proj": "a", "down_proj": "b"}
"""By target, the half on the side of the hidden states; under `shared_outer`, experts share these halves."""

DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}
"""Dtypes of an adapter, and the dtypes of its arrays."""

Experts = Literal["per_expert", "shared_outer"]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """The composition of an adapter.

    Attributes:
        targets: adapted linear layers, in the order of `TARGETS`.
        rank, alpha: rank and alpha of every pair.
        experts: whether experts share their outer halves.
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    experts: Experts = "per_expert"

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(target for target in TARGETS if target in self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def kind_of(section: LoraSection, m: Shape) -> Kind:
    """Return the kind of adapter that a run trains."""
    return Kind(m.adapters if section.targets is None else section.targets, section.rank, section.alpha, section.experts)


Place = Literal["", "shared", "experts"]
"""Owner of a linear layer: attention or a dense MLP, the shared experts, or each routed expert."""


def places(m: Shape, target: str, dense: bool) -> tuple[Place, ...]:
    """Return the places of a target's linear layers in a layer; `dense` means without experts."""
    if dense or target in ATTENTION:
        return ("",)
    return ("shared", "experts") if m.shared_width else ("experts",)


def sizes(m: Shape, target: str, dense: bool, place: Place) -> tuple[int, int]:
    """Return (out, in) of a linear layer."""
    front = {"": "", "shared": "shared.", "experts": "experts.0."}[place]
    out, into = layer_shapes(m, dense)[front + target.partition("_proj")[0]]
    return out, into


@dataclass(frozen=True)
class Pair:
    """The two halves of a linear layer's pair.

    Attributes:
        layer, place, expert, target: identify the linear layer; expert None: not a routed expert's.
        a, b: canonical names of the halves; a shared half has the same name for all experts.
        inputs, outputs: columns and rows of the layer's weight.
    """

    layer: int
    place: Place
    expert: int | None
    target: str
    a: str
    b: str
    inputs: int
    outputs: int


def pairs(m: Shape, kind: Kind) -> Iterator[Pair]:
    """Yield all pairs, layer by layer: attention, then shared experts or the dense MLP, then expert by expert."""
    for dense, run in m.runs(range(m.layers)):
        for layer, (place, expert, target, (outputs, inputs)) in product(run, _linears(m, kind, dense)):
            front = place and f"{place}." if expert is None else f"experts.{expert}."
            shared = f"experts.shared.{target}" if expert is not None and kind.experts == "shared_outer" else ""
            names = {half: f"layers.{layer}.{shared if shared and OUTER[target] == half else front + target}.{half}" for half in "ab"}
            yield Pair(layer, place, expert, target, names["a"], names["b"], inputs, outputs)


def halves(m: Shape, kind: Kind) -> Shapes:
    """Return the canonical names and shapes of all halves, each once."""
    found: Shapes = {}
    for pair in pairs(m, kind):
        found[pair.a] = (kind.rank, pair.inputs)
        found[pair.b] = (pair.outputs, kind.rank)
    return found


@dataclass(frozen=True)
class Adapter:
    """An adapter with its values.

    Attributes:
        dtype: a key of `DTYPES`.
        values: every half of `halves(m, kind)`, C-contiguous.
    """

    kind: Kind
    dtype: str
    values: Arrays


STACKS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "q_b_proj": ("q_b_proj",),
    "kv_b_proj": ("kv_b_proj",),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""SGLang's modules and the linear layers that each stacks."""


def served_targets(kind: Kind) -> tuple[str, ...]:
    """Return the targets that an engine is configured with and receives: the adapter's, and those that SGLang requires with them.

    SGLang stacks q, k and v, the down-projections of latent attention, and gate and up, and fails at the first request if a layer of a
    stack is missing (`LoRAAdapter.normalize_qkv_proj`, `get_target_module_name`). It adapts experts only if all three of their layers are
    targets (`LoRAManager.init_lora_modules`).
    """
    wanted = {target for stack in (*STACKS.values(), MLP) for target in stack if set(stack) & set(kind.targets)}
    return tuple(target for target in TARGETS if target in wanted)


def served_config(kind: Kind) -> dict[str, Any]:
    """Return the keys of an adapter's configuration that SGLang reads."""
    return {"peft_type": "LORA", "r": kind.rank, "lora_alpha": kind.alpha, "target_modules": list(served_targets(kind)), "bias": "none"}


def _linears(m: Shape, kind: Kind, dense: bool) -> list[tuple[Place, int | None, str, tuple[int, int]]]:
    """Return (place, expert or None, target, (out, in)) of the linear layers of a layer."""
    at = [(place, target) for target in kind.targets for place in places(m, target, dense)]
    found: list[tuple[Place, int | None, str, tuple[int, int]]] = [
        (place, None, target, sizes(m, target, dense, place)) for place, target in at if place != "experts"
    ]
    each = [(target, sizes(m, target, dense, place)) for place, target in at if place == "experts"]
    return found + [("experts", expert, target, size) for expert in range(m.experts) for target, size in each]
