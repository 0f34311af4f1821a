"""Configuration for Megatron: its model configuration, layer specs and gradient reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.platform import kernels, megatron
from asyncmoe.trainer.model.features import run_features
from asyncmoe.trainer.model.gpu_settings import float8_arguments
from asyncmoe.trainer.model.switches import Switches, decide, megatron_arguments

megatron.prepare()

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from asyncmoe.platform.megatron import rope  # noqa: E402
from asyncmoe.platform.megatron.grouped_experts import GroupedExperts  # noqa: E402
from asyncmoe.platform.megatron.local_layers import LatentAttention, RMSNorm  # noqa: E402
from asyncmoe.platform.megatron.packed_attention import PackedAttention  # noqa: E402

rope.install()


def switches(hf: Mapping[str, Any], config: Config, dtype: torch.dtype) -> Switches:
    """Decide which of Megatron's switches are on in this run.

    Raises:
        ConfigError: the configuration requests an impossible setting.
    """
    return decide(config.trainer, kernels.detect(), run_features(hf, config, dtype == torch.float32))


def ddp_config(config: Config, on: Switches) -> DistributedDataParallelConfig:
    """Return the configuration of Megatron's data parallelism; gradients are summed in float32."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=on.overlap_grad_reduce,
        overlap_param_gather=on.overlap_param_gather,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
    )


def transformer_config(
    family: Mapping[str, Any], config: Config, device: torch.device, dtype: torch.dtype, on: Switches
) -> TransformerConfig:
    """Return Megatron's model configuration. `family`: keyword arguments from the model family.

    Raises:
        ConfigError: `trainer.recompute_modules` names a module that cannot be recomputed.
    """
    trainer, interleaved = config.trainer, config.trainer.vpp > 1
    given: dict[str, Any] = {
        "tensor_model_parallel_size": trainer.tp,
        "context_parallel_size": trainer.cp,
        "pipeline_model_parallel_size": trainer.pp,
        "virtual_pipeline_model_parallel_size": trainer.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": trainer.first_stage_layers,
        "num_layers_in_last_pipeline_stage": trainer.last_stage_layers,
        "expert_model_parallel_size": trainer.ep,
        "expert_tensor_parallel_size": trainer.expert_tp,
        "sequence_parallel": trainer.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Packed micro-batches differ in row count, so pipeline stages exchange shapes, except if chunks interleave: both neighbours of a
        # stage may then be the same rank, which would confuse the shapes sent forwards and backwards. See `schedule.BatchGrid`.
        "variable_seq_lengths": not interleaved,
        # For the same reason, messages in the two directions must not share one batch of sends and receives.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The interleaved schedule frees an output while it is being sent, which is safe only if a stream orders the two.
        "deallocate_pipeline_outputs": not (interleaved and device.type == "cpu"),
        # Losses are already divided by the step's denominator: Megatron must not divide by ranks or micro-batches.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _finalize,
        "use_cpu_initialization": device.type == "cpu",
        "bias_dropout_fusion": False,  # there is neither a bias nor dropout to fuse
        "masked_softmax_fusion": False,  # part of an attention that is not used
        "persist_layer_norm": False,
        **megatron_arguments(on),
        **float8_arguments(trainer),
        **_recompute(config, on, bool(family.get("multi_latent_attention"))),
    }
    kind = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    return kind(**{**family, **given})


def _recompute(config: Config, on: Switches, latent: bool) -> Mapping[str, Any]:
    modules = config.trainer.recompute_modules
    if config.trainer.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if config.trainer.recompute == "none":
        return {}
    for module, possible, why in (
        ("moe_act", on.experts == "transformer_engine", "the experts are not Transformer Engine's"),
        # Megatron asks Transformer Engine whether it computes in float8 (`CheckpointWithoutOutputFunction`): a NameError without it.
        ("layernorm", on.transformer_engine, "the layers are not Transformer Engine's"),
        ("mla_up_proj", latent, "the model's attention is not latent"),
    ):
        if module in modules and not possible:
            raise ConfigError("trainer.recompute_modules", got=module, expected=f"a list without it, because {why}", hint="remove it")
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def spec(config: TransformerConfig, on: Switches, chunk: int | None) -> Any:
    """Return Transformer Engine's layers, or Megatron's local layers with this package's norm, core attention and experts."""
    if on.transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=chunk)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk)
    for layer in block.layer_specs:  # the list may repeat an object; setting it again changes nothing
        submodules = layer.submodules
        submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            submodules.self_attention.module = LatentAttention
            attention.q_layernorm, attention.kv_layernorm = IdentityOp if config.q_lora_rank is None else RMSNorm, RMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if on.experts == "torch" and hasattr(submodules.mlp.submodules, "experts"):
            submodules.mlp.submodules.experts.module = GroupedExperts
    block.layer_norm = RMSNorm
    return block


def fuse_gradient_accumulation(chunk: torch.nn.Module) -> None:
    """Make Transformer Engine's layers add their weight gradients to `main_grad` themselves. Megatron would set this from
    `gradient_accumulation_fusion`, which its own output layer refuses without an apex extension."""
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  torch's type of module attributes excludes it


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Run Megatron's gradient reductions without its division by the number of tokens (see `calculate_per_token_loss` above). Megatron also
    applies its update rule to router biases here, with rate 0: see `asyncmoe.trainer.model.balance`."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
