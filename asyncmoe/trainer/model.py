"""Megatron's GPTModel from a Hugging Face configuration, and its weights from a Hugging Face checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import InvariantBroken
from asyncmoe.models import MegatronParallel, adapter_of, family_of
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.halves import PREFIX as ADAPTERS
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.platform import megatron
from asyncmoe.reshard import LocalTransport, Piece, RankLayout, exchange, plan_each
from asyncmoe.trainer.hf_checkpoint import HFCheckpoint
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.mesh import Mesh

megatron.prepare()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from asyncmoe.trainer.attention import PackedAttention  # noqa: E402
from asyncmoe.trainer.balance import Balance  # noqa: E402
from asyncmoe.trainer.latent import LatentAttention  # noqa: E402
from asyncmoe.trainer.norm import RMSNorm  # noqa: E402


@dataclass(frozen=True, eq=False)
class Model:
    """One rank's part of the model.

    Attributes:
        config: Megatron's.
        chunks: the bare GPTModels of this pipeline stage, one unless stages interleave; their parameters have the names `asyncmoe.models`
            uses within a chunk.
        ddp: what runs: each of `chunks` inside the cast to bfloat16, if any, inside Megatron's data parallelism.
        dtype: of the parameters.
        hf: the Hugging Face configuration.
        parallel: the sizes it is spread over.
        mesh: this rank's place.
        adapter: what is trained in place of the weights, if anything is.
        balance: trains the biases that routers choose by, if they are trained.
    """

    config: TransformerConfig
    chunks: tuple[torch.nn.Module, ...]
    ddp: tuple[DistributedDataParallel, ...]
    dtype: torch.dtype
    hf: Mapping[str, Any]
    parallel: MegatronParallel
    mesh: Mesh
    adapter: Kind | None
    balance: Balance | None = None


def build(hf: Mapping[str, Any], config: Config, mesh: Mesh) -> Model:
    """This rank's part, with random weights; `load_hf` fills it. Weights are float32, or bfloat16 with float32 gradients and masters.

    Raises:
        ConfigError: an adapter that the model cannot have.
    """
    te = has_transformer_engine()
    dtype = _dtype(config.trainer.dtype, mesh)
    family_config, gpt = family_of(hf).megatron_config(hf)
    megatron_config = _transformer_config(family_config, config, mesh, dtype, te)
    chunks = tuple(
        GPTModel(
            config=megatron_config,
            transformer_layer_spec=_spec(megatron_config, te, chunk if mesh.vpp > 1 else None),
            pre_process=mesh.pp_rank == 0 and chunk == 0,
            post_process=mesh.last_stage and chunk == mesh.vpp - 1,
            parallel_output=True,
            vp_stage=chunk if mesh.vpp > 1 else None,
            **gpt,
        ).to(mesh.device)
        for chunk in range(mesh.vpp)
    )
    shape = family_of(hf).shape_of(hf)
    if config.adapter is not None:
        attach.attach(chunks, megatron_config, shape, config.adapter, mesh.parallel(te), mesh.rank, config.run.seed)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.trainer.optimizer.distributed,
    )
    inner = [Float16Module(megatron_config, chunk) if dtype == torch.bfloat16 else chunk for chunk in chunks]
    for chunk in chunks:
        for _, bias in _selection_biases(chunk):
            bias.data = bias.data.float()  # from what Float16Module has made of it; Megatron does so too, but only in a forward pass
    ddp = tuple(DistributedDataParallel(megatron_config, ddp_config, chunk) for chunk in inner)
    for chunk in ddp:
        chunk.train()
    rate = config.trainer.router_bias_rate
    balance = Balance(chunks, shape.layers, rate, (mesh.tp_rank, mesh.tp)) if shape.router_bias and rate else None
    return Model(megatron_config, chunks, ddp, dtype, hf, mesh.parallel(te), mesh, adapter_of(config, hf), balance)


def has_transformer_engine() -> bool:
    """Transformer Engine is installed and there is a GPU for it; the model is then built from its modules."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def parameters(model: Model) -> dict[str, torch.Tensor]:
    """This rank's weights by local Megatron name, as `Family.megatron_layout` names its storages; they are the weights themselves.

    A weight may have another dtype than its storage in the layout: see `asyncmoe.trainer.sources`.
    """
    return {name: tensor.data for name, tensor in named_tensors(model)}


def named_tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's weights under the names of `parameters`: those that are trained, and the biases that routers choose by, which are
    buffers. Adapters, which are no weights of the model, are not among them."""
    for number, chunk in enumerate(model.chunks):
        front = chunk_prefix(number, len(model.chunks))
        yield from ((front + name, parameter) for name, parameter in chunk.named_parameters() if not name.startswith(ADAPTERS))
        yield from ((front + name, bias) for name, bias in _selection_biases(chunk))


def _selection_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))


def load_hf(model: Model, path: Path) -> None:
    """Fill this rank's weights from a Hugging Face checkpoint. One parameter at a time, reading only the tensors that are part of it.

    Raises:
        DataError: a tensor is missing or has another shape, or a file cannot be read.
        InvariantBroken: the layout table does not describe the model that was built.
    """
    checkpoint = HFCheckpoint(path)
    weights = parameters(model)
    for name, value in local_tensors(model, checkpoint):
        weights[name].copy_(value)


def local_tensors(model: Model, checkpoint: HFCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's weights, by local Megatron name, as a Hugging Face checkpoint has them; on the host, in the layout's dtypes."""
    family, dtype = family_of(model.hf), str(model.dtype).removeprefix("torch.")
    source = family.hf_layout(model.hf, dtype).at(0)
    local = family.megatron_layout(model.hf, model.parallel, model.mesh.rank, dtype).at(0)
    _check_layout(local, parameters(model))
    plans = plan_each(family.tensors(model.hf), [source], [[part] for part in _each_storage(local)])
    for name, steps in zip(local.storages, plans, strict=True):
        arrays = {n: checkpoint.read(n, one.shape, getattr(torch, one.dtype)) for n, one in steps.sources.get(0, {}).items()}
        value = torch.empty(local.storages[name].shape, dtype=getattr(torch, local.storages[name].dtype))
        exchange(steps, LocalTransport(), arrays, {name: value})
        yield name, value


def _each_storage(layout: RankLayout) -> list[RankLayout]:
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.storages}
    for piece in layout.pieces:
        pieces[piece.storage].append(piece)
    return [RankLayout(layout.rank, {name: storage}, tuple(pieces[name])) for name, storage in layout.storages.items()]


def _check_layout(layout: RankLayout, built: Mapping[str, torch.Tensor]) -> None:
    described = {name: storage.shape for name, storage in layout.storages.items()}
    existing = {name: tuple(tensor.shape) for name, tensor in built.items()}
    differ = sorted(name for name in described.keys() | existing.keys() if described.get(name) != existing.get(name))
    if differ:
        name = differ[0]
        raise InvariantBroken(
            f"{name}: the layout table says {described.get(name)}, Megatron built {existing.get(name)} ({len(differ)} differ)"
        )


def _dtype(choice: str, mesh: Mesh) -> torch.dtype:
    if choice == "auto":
        return torch.float32 if mesh.device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if choice == "bfloat16" else torch.float32


def _transformer_config(family: Mapping[str, Any], config: Config, mesh: Mesh, dtype: torch.dtype, te: bool) -> TransformerConfig:
    interleaved = mesh.vpp > 1
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    switches: dict[str, Any] = {
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
        "moe_grouped_gemm": te,
        "use_cpu_initialization": mesh.device.type == "cpu",
        "gradient_accumulation_fusion": False,  # needs Apex' or Transformer Engine's own kernels
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "moe_permute_fusion": False,
        "moe_router_fusion": False,
        "persist_layer_norm": False,
        **(recompute if config.trainer.recompute == "full" else {}),
    }
    kind = MLATransformerConfig if family.get("multi_latent_attention") else TransformerConfig
    return kind(**{**family, **switches})


def _spec(config: TransformerConfig, te: bool, chunk: int | None) -> Any:
    """Transformer Engine's layers, or Megatron's local ones with this package's norm and core attention."""
    if te:
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
    block.layer_norm = RMSNorm
    return block


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reductions of gradients, without its division by the number of tokens (see `calculate_per_token_loss` above). It also
    applies the routers' own rule to their biases, whose rate is 0: see `asyncmoe.trainer.balance`."""
    del num_tokens
    finalize_model_grads(model, None, **kwargs)
