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
from asyncmoe.models.importing.tensors import CheckpointTensors
from asyncmoe.reshard.layout import Box

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")
_FUSED = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
    "self_attention.q_layernorm.weight": ("self_attention.linear_q_up_proj.layer_norm_weight",),
    "self_attention.kv_layernorm.weight": ("self_attention.linear_kv_up_proj.layer_norm_weight",),
}
"""Other names of a layer's norms."""
_HALVES = ("_w", "_v")
_NOT_OURS = re.compile(
    r"^(optimizer\.|chained_\d+\.|rng_state|rerun_state|opt_param_scheduler|mtp\.)|_extra_state$|\.expert_bias_|local_tokens_per_expert$"
)
"""What a checkpoint has besides the weights: the optimizer, states of layers, counts, and layers of multi-token prediction."""
_VOCABULARY = (_EMBEDDING, "output_layer.weight")


@dataclass(frozen=True)
class TensorPart:
    """A box of a checkpoint's tensor that has a parameter, or a half of one."""

    name: str
    box: Box


def front_of(tensors: CheckpointTensors) -> str:
    """Return what precedes all names: "" unless the model is a part of another module.

    Raises:
        DataError: the checkpoint has no embedding, or several.
    """
    found = [name for name in tensors.names() if name.endswith(_EMBEDDING) and not _NOT_OURS.search(name)]
    if len(found) != 1:
        raise DataError("the checkpoint", got=f"{len(found)} tensors ...{_EMBEDDING}", expected="one: a GPTModel of Megatron's")
    return found[0].removesuffix(_EMBEDDING)


def parts_of(tensors: CheckpointTensors, front: str, parameter: str, shape: tuple[int, ...], layers: int, experts: int) -> list[TensorPart]:
    """Return where a parameter is; two parts are halves of its rows.

    Args:
        front: see `front_of`.
        parameter: as a single rank of Megatron's own layers has it.
        shape: of the parameter.
        layers, experts: of the model.

    Raises:
        DataError: the checkpoint has no such tensor, or one of another shape.
    """
    names, there = list(_places(parameter, layers, experts)), tensors.names()
    for name, at, stacked in names:
        whole = front + name
        if whole in there:
            return [TensorPart(whole, _box(tensors, whole, parameter, at, stacked, shape))]
        if all(whole + half in there for half in _HALVES):
            rows = (shape[0] // 2, *shape[1:])
            return [TensorPart(whole + half, _box(tensors, whole + half, parameter, at, stacked, rows)) for half in _HALVES]
    raise DataError("the checkpoint", got=f"no tensor {front}{names[0][0]}", expected="the weights of the model that --model names")


def left_over(tensors: CheckpointTensors, front: str, taken: set[str]) -> tuple[list[str], bool]:
    """Return the weights that nothing was made of, sorted, and whether there are layers of multi-token prediction among the others."""
    rest = sorted(tensors.names() - taken)
    inner = {name: name.removeprefix(front) for name in rest}
    return [name for name in rest if not _NOT_OURS.search(inner[name])], any(one.startswith("mtp.") for one in inner.values())


def _places(parameter: str, layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the names that a parameter may have, with its index in the stacked dimensions and their sizes."""
    found = _LAYER.match(parameter)
    if found is None:
        yield parameter, (), ()
        return
    layer, inner = int(found[1]), found[2]
    for name, at, stacked in _in_layer(inner, experts):
        yield f"decoder.layers.{layer}.{name}", at, stacked
        yield f"decoder.layers.{name}", (layer, *at), (layers, *stacked)


def _in_layer(inner: str, experts: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    found = _EXPERT.match(inner)
    if found is None:
        for name in (inner, *_FUSED.get(inner, ())):
            yield name, (), ()
        return
    expert, rest = int(found[1]), found[2]
    yield f"mlp.experts.experts.{rest}", (expert,), (experts,)
    yield f"mlp.experts.experts.{expert}.{rest}", (), ()


def _box(
    tensors: CheckpointTensors, name: str, parameter: str, at: tuple[int, ...], stacked: tuple[int, ...], shape: tuple[int, ...]
) -> Box:
    """Return a parameter's box in a tensor. A vocabulary may be padded, so only its first rows are the model's."""
    got, wanted = tensors.shape(name), (*stacked, *shape)
    padded = parameter in _VOCABULARY and len(got) == len(wanted) and got[0] >= wanted[0] and got[1:] == wanted[1:]
    if got != wanted and not padded:
        raise DataError(
            f"the checkpoint: tensor {name}", got=f"shape {list(got)}", expected=f"shape {list(wanted)}, as the model of --model has"
        )
    return Box((*at, *(0 for _ in shape)), (*(1 for _ in stacked), *shape))
