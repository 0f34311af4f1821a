"""The adapters of a model chunk as one module, and its checkpoint form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncmoe.models.lora.halves import PREFIX, Half
from asyncmoe.platform import megatron
from asyncmoe.trainer.lora.pairs import Pairs

megatron.prepare()

from megatron.core import parallel_state as groups  # noqa: E402  only after the platform is prepared
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402


class Adapters(torch.nn.Module):
    """The pairs of a model chunk, by layer number (from 0 in the chunk) and linear layer.

    Attributes:
        on: whether the pairs are added to their layers' outputs.
    """

    def __init__(self, layers: Sequence[Mapping[str, Pairs]]) -> None:
        super().__init__()
        self.on = True
        for number, linears in enumerate(layers):
            self.add_module(str(number), torch.nn.ModuleDict(dict(linears)))

    def layers(self) -> Iterator[torch.nn.ModuleDict]:
        """Yield the pairs of each layer by the name of their linear layer."""
        yield from (layer for layer in self.children() if isinstance(layer, torch.nn.ModuleDict))

    def halves(self) -> Iterator[tuple[str, int, Half, torch.nn.Parameter]]:
        """Yield each parameter: its name in this module, its layer's number in the model, its description, the parameter."""
        for place, pairs in self.named_modules():
            if isinstance(pairs, Pairs):
                yield from ((f"{place}.{name}", pairs.layer, half, pairs.get_parameter(name)) for name, half in pairs.halves.items())

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the state for Megatron's checkpoints. Keys number the layers of the whole model, and experts are divided along the first
        dimension, so an adapter can be loaded under other parallel sizes."""
        del sharded_offsets, metadata
        return {prefix + name: _sharded(layer, half, parameter) for name, layer, half, parameter in self.halves()}


def _sharded(layer: int, half: Half, parameter: torch.nn.Parameter) -> Any:
    offsets, first = [], 0
    if half.experts is not None:
        offsets.append((0, groups.get_expert_model_parallel_rank(), groups.get_expert_model_parallel_world_size()))
        first = 1
    if half.axis is not None:
        offsets.append((first + half.axis, half.index, half.parts))
    # Of several copies only one is written, by the first data- and context-parallel rank and, if tensor-parallel ranks
    # hold copies, the first of these.
    if half.experts is None:
        tensor, data = groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank(with_context_parallel=True)
    else:
        tensor, data = groups.get_expert_tensor_parallel_rank(), groups.get_expert_data_parallel_rank()
    key = f"{PREFIX}layers.{layer}.{half.front if half.experts is None else 'experts.'}{half.projection}.{half.side}"
    return ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=(0, 0 if half.axis is not None else tensor, data))
