"""Megatron settings that save memory or time on GPUs: the optimizer in host memory, averages in bfloat16, and layers in float8.

Megatron's checks are made here first, in the configuration's terms (megatron-core 0.16.1 and 0.19.2: `OptimizerConfig.__post_init__`,
`TransformerConfig.__post_init__`, `fp8_utils.get_fp8_recipe`). Two of its settings are never used:

- weights as bfloat16 and 16 remaining bits (`store_param_remainders`): a checkpoint would hold the bits, which nothing else can read;
- offload of single activations (`fine_grained_activation_offloading`): it reuses a plan made from the first step's micro-batches
  (`PipelineOffloadManager`), but here steps vary in their number of micro-batches and include passes without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncmoe.config.trainer import MemorySection, TrainerSection, no_gpu_for
from asyncmoe.errors import ConfigError
from asyncmoe.platform.kernels import Kernels

ROWS = 128
"""With float8, a rank's rows of a micro-batch are a multiple of this: the side of a block that shares a scale."""
_PRECISE = (2, 1)
"""First Transformer Engine release whose Adam supports averages in bfloat16."""
_BLOCKWISE = (2, 3)
"""First Transformer Engine release whose blockwise recipe Megatron uses."""
_HOPPER = (9, 0)


def check(trainer: TrainerSection, kernels: Kernels, engine: bool, lacking: str) -> None:
    """Refuse settings that this machine does not support.

    Args:
        engine: whether the model is built from Transformer Engine's layers.
        lacking: why it is not built from these layers.

    Raises:
        ConfigError: names the key and a fix.
    """
    if not kernels.cuda:
        for key, value in trainer.needs_gpu:
            raise no_gpu_for(key, value)
    if trainer.memory.low_precision and (why := older_engine(kernels, _PRECISE)):
        key, value = next(one for one in trainer.needs_gpu if one[1] == "bfloat16")
        raise ConfigError(key, got=value, expected=f"float32 because {why}", hint="leave it out, or install Transformer Engine")
    if trainer.precision == "fp8" and (why := _lacks_float8(kernels, engine, lacking)):
        raise ConfigError("trainer.precision", got="fp8", expected=f"null because {why}", hint="leave it out")


def _lacks_float8(kernels: Kernels, engine: bool, lacking: str) -> str:
    if kernels.capability < _HOPPER:
        return f"blocks of float8 need capability 9.0 (Hopper), and this GPU has {'.'.join(map(str, kernels.capability))}"
    return older_engine(kernels, _BLOCKWISE) if engine else lacking


def older_engine(kernels: Kernels, release: tuple[int, ...]) -> str:
    """Return a message if Transformer Engine is missing or older than a release, else ""."""
    if kernels.transformer_engine >= release:
        return ""
    found, needed = (".".join(map(str, one)) for one in (kernels.transformer_engine, release))
    return f"Transformer Engine is {found}, older than {needed}" if found else "Transformer Engine is not installed"


def optimizer_arguments(memory: MemorySection) -> Mapping[str, object]:
    """Return keyword arguments of Megatron's OptimizerConfig, except for the dtypes of averages; none if no memory is to be saved."""
    if not memory.precision_aware:
        return {}
    offloaded = {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": memory.optimizer_offload,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
    precise = {"use_precision_aware_optimizer": True, "store_param_remainders": False}
    return {**precise, **(offloaded if memory.optimizer_offload else {})}


def float8_arguments(trainer: TrainerSection) -> Mapping[str, object]:
    """Return keyword arguments of Megatron's TransformerConfig; none without float8.

    Weights stay bfloat16 (`fp8_param`), so the trained weights are those saved, exported and sent to engines. Attention
    (`fp8_dot_product_attention`) stays bfloat16 too. Embedding, output layer and router are not Transformer Engine layers.
    """
    if trainer.precision != "fp8":
        return {}
    edges = trainer.edge_layers
    return {
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
        "fp8_param": False,
        "fp8_dot_product_attention": False,
        "first_last_layers_bf16": edges > 0,
        "num_layers_at_start_in_bf16": edges,
        "num_layers_at_end_in_bf16": edges,
    }
