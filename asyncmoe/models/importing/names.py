"""Under which name, and where in it, a checkpoint has what a single rank of Megatron calls a parameter.

Layers and experts are either tensors of their own or stacked in one, as Megatron's layers and its metadata of a save decide:

    decoder.layers.7.mlp.linear_fc2.weight                    layers that differ (a list as moe_layer_freq), or `singleton_local_shards`
    decoder.layers.mlp.linear_fc2.weight                      [layers, ...]: all layers alike
    ...mlp.experts.experts.linear_fc1.weight                  [experts, ...], after the layers if these are stacked
    ...mlp.experts.experts.5.linear_fc1.weight                `singleton_local_shards`
    ...linear_fc1.weight_w, ...linear_fc1.weight_v            the halves of a gated layer, with `singleton_local_shards`
    ...self_attention.linear_qkv.layer_norm_weight            a norm that Transformer Engine fuses, and Megatron's own layers name so

Source: megatron/core 0.16.1: `sharded_state_dict` in transformer/transformer_block.py, transformer/mlp.py, transformer/moe/experts.py; the
layer specs in models/gpt/gpt_layer_specs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncmoe.errors import DataError
from asyncmoe.models.importing.folder import CheckpointTensors
from asyncmoe.models.shape import Shape
from asyncmoe.reshard.layout import Box

EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""Other names of a layer's norms."""
_HALVES = ("_w", "_v")
NOT_OURS = re.compile(
    r"^(optimizer\.|chained_\d+\.|rng_state|rerun_state|opt_param_scheduler|mtp\.)|_extra_state$|\.expert_bias_|local_tokens_per_expert$"
)
"""What a checkpoint has besides the weights: the optimizer, states of layers, counts, and layers of multi-token prediction."""
_VOCABULARY = (EMBEDDING, "output_layer.weight")


@dataclass(frozen=True)
class TensorPart:
    """Where a parameter, or a half of its rows, is.

    Attributes:
        name, box: of the checkpoint's tensor; all experts of a layer are in the box of each.
        at: the parameter's number among those in the box.
        shape: of the parameter or half.
    """

    name: str
    box: Box
    at: int
    shape: tuple[int, ...]


def front_of(tensors: CheckpointTensors) -> str:
    """Return what precedes all names: "" unless the model is a part of another module.

    Raises:
        DataError: the checkpoint has no embedding, or several.
    """
    found = [name for name in tensors.stored if name.endswith(EMBEDDING) and not NOT_OURS.search(name)]
    if len(found) != 1:
        raise DataError("the checkpoint", got=f"{len(found)} tensors ...{EMBEDDING}", expected="one: a GPTModel of Megatron's")
    return found[0].removesuffix(EMBEDDING)


def parts_of(tensors: CheckpointTensors, front: str, parameter: str, shape: tuple[int, ...], m: Shape) -> list[TensorPart]:
    """Return where a parameter is; two parts are halves of its rows.

    Args:
        front: see `front_of`.
        parameter: as a single rank of Megatron's own layers has it.
        shape: of the parameter.
        m: of the model.

    Raises:
        DataError: the checkpoint has no such tensor, or one of another shape.
    """
    places = list(_places(parameter))
    for name, layer, expert in places:
        layers, experts = () if layer is None else (m.layers,), () if expert is None else (m.experts,)
        for ends, rows in ((("",), shape), (_HALVES, (shape[0] // 2, *shape[1:]))):
            if all(front + name + end in tensors.stored for end in ends):
                inner = (*experts, *rows)
                box = Box((layer or 0,) * len(layers) + (0,) * len(inner), (1,) * len(layers) + inner)
                for end in ends:
                    _check(tensors, front + name + end, layers + inner, parameter in _VOCABULARY)
                return [TensorPart(front + name + end, box, expert or 0, rows) for end in ends]
    raise DataError("the checkpoint", got=f"no tensor {front}{places[0][0]}", expected="the weights of the model that --model names")


def _places(parameter: str) -> Iterator[tuple[str, int | None, int | None]]:
    """Yield the names that a parameter may have, with its numbers in the stacked layers and experts; None: they are not stacked."""
    found = _LAYER.match(parameter)
    if found is None:
        yield parameter, None, None
        return
    layer, inner = int(found[1]), found[2]
    inners: list[tuple[str, int | None]] = [(inner, None), *([(_FUSED[inner], None)] if inner in _FUSED else [])]
    if (of_expert := _EXPERT.match(inner)) is not None:
        inners = [(f"mlp.experts.experts.{of_expert[2]}", int(of_expert[1])), (f"mlp.experts.experts.{of_expert[1]}.{of_expert[2]}", None)]
    for name, expert in inners:
        yield f"decoder.layers.{layer}.{name}", None, expert
        yield f"decoder.layers.{name}", layer, expert


def _check(tensors: CheckpointTensors, name: str, wanted: tuple[int, ...], padded: bool) -> None:
    """Refuse a tensor of another shape; of a padded vocabulary only the first rows are the model's."""
    got = tuple(tensors.stored[name].size)
    if got != wanted and not (padded and len(got) == len(wanted) and got[0] >= wanted[0] and got[1:] == wanted[1:]):
        expected = f"shape {list(wanted)}, as the model of --model has"
        raise DataError(f"the checkpoint: tensor {name}", got=f"shape {list(got)}", expected=expected)
