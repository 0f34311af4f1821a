"""What Megatron is told: the configuration of its model, the layers it is built from, and how gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.platform import kernels, megatron
from asyncmoe.trainer.model.features import run_features
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trainer.model.switches import Switches, decide, megatron_arguments

megatron.prepare()

from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from asyncmoe.platform.megatron import rope  # noqa: E402
from asyncmoe.trainer.model.attention import PackedAttention  # noqa: E402
from asyncmoe.trainer.model.grouped import GroupedExperts  # noqa: E402
from asyncmoe.trainer.model.latent import LatentAttention  # noqa: E402
from asyncmoe.trainer.model.norm import RMSNorm  # noqa: E402

rope.install()


def switches(hf: Mapping[str, Any], config: Config, mesh: Mesh, dtype: torch.dtype) -> Switches:
    """Which of Megatron's switches are on here.

    Raises:
        ConfigError: the configuration asks for what cannot be.
    """
    return decide(config.trainer.megatron, kernels.detect(), run_features(hf, config, mesh.parallel(te=False), dtype == torch.float32))


def ddp_config(config: Config, on: Switches) -> DistributedDataParallelConfig:
    """Of Megatron's data parallelism: gradients are added in float32."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=on.overlap_grad_reduce,
        overlap_param_gather=on.overlap_param_gather,
        use_distributed_optimizer=config.trainer.distributed_optimizer,
    )


def transformer_config(family: Mapping[str, Any], config: Config, mesh: Mesh, dtype: torch.dtype, on: Switches) -> TransformerConfig:
    """`family`: keyword arguments that the model's family gives.

    Raises:
        ConfigError: a part of a layer that cannot be computed again.
    """
    interleaved = mesh.vpp > 1
    given: dict[str, Any] = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp if interleaved else None,
        "num_layers_in_first_pipeline_stage": mesh.first_layers,
        "num_layers_in_last_pipeline_stage": mesh.last_layers,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "sequence_parallel": mesh.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Micro-batches of packed sequences differ in rows; pipeline stages tell each other the shape. Not so where chunks interleave: the
        # two neighbours of a stage may be one rank, which takes the shape sent forwards for the one sent backwards. See `batch.Grid`.
        "variable_seq_lengths": not interleaved,
        # For the same reason messages in the two directions must not travel together, in one batch of sends and receives.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # The schedule of interleaved chunks frees an output while it is being sent: right only where a stream orders the two.
        "deallocate_pipeline_outputs": not (interleaved and mesh.backend == "gloo"),
        # Losses arrive already divided by the step's denominator: nothing is to be divided by ranks or micro-batches.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _finalize,
        "use_cpu_initialization": mesh.device.type == "cpu",
        "bias_dropout_fusion": False,  # there is neither
        "masked_softmax_fusion": False,  # of an attention that is not used
        "persist_layer_norm": False,
        **megatron_arguments(on),
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
        ("mla_up_proj", latent, "the model's attention is not latent"),
    ):
        if module in modules and not possible:
            raise ConfigError("trainer.recompute_modules", got=module, expected=f"others because {why}", cure="take it out")
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def spec(config: TransformerConfig, on: Switches, chunk: int | None) -> Any:
    """Transformer Engine's layers, or Megatron's local ones with this package's norm, core attention and experts."""
    if on.transformer_engine:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm", vp_stage=chunk)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=chunk)
    for layer in block.layer_specs:  # the same object may be there more than once; setting it again changes nothing
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
    """Have Transformer Engine's layers add the gradients of their weights to `main_grad` themselves. Megatron would tell them from
    `gradient_accumulation_fusion`, which its own output layer refuses without an extension of apex."""
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  a module's attributes have types that do not know it


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reductions of gradients, without its division by the number of tokens (see `calculate_per_token_loss` above). It also
    applies the routers' own rule to their biases, whose rate is 0: see `asyncmoe.trainer.model.balance`."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
