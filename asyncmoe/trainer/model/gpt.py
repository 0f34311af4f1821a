"""Builds Megatron's GPTModel from a Hugging Face configuration, and loads its weights from a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import Config
from asyncmoe.errors import InvariantBroken
from asyncmoe.models import MegatronParallel, adapter_of, family_of, trainer_parallel
from asyncmoe.models.hf_checkpoint import HFCheckpoint
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.lora.halves import PREFIX as ADAPTERS
from asyncmoe.models.megatron import chunk_prefix
from asyncmoe.platform import megatron
from asyncmoe.reshard import LocalTransport, RankLayout, exchange, plan_each
from asyncmoe.trainer.lora import attach
from asyncmoe.trainer.model.mesh import Mesh
from asyncmoe.trainer.model.switches import Switches

megatron.prepare()

from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from asyncmoe.trainer.model import layers  # noqa: E402  only after the platform is prepared
from asyncmoe.trainer.model.balance import Balance  # noqa: E402


@dataclass(frozen=True, eq=False)
class Model:
    """One rank's part of the model.

    Attributes:
        config: Megatron's model configuration.
        chunks: the bare GPTModels of this pipeline stage, one unless stages interleave; their parameters have the names `asyncmoe.models`
            uses within a chunk.
        ddp: the modules to run: each of `chunks`, wrapped in the cast to bfloat16, if any, and then in Megatron's data parallelism.
        dtype: dtype of the parameters.
        hf: the Hugging Face configuration.
        parallel: the parallel sizes.
        mesh: this rank's position.
        switches: Megatron's switches.
        adapter: the adapter that is trained instead of the weights, if any.
        balance: trains the routers' selection biases, if they are trained.
    """

    config: TransformerConfig
    chunks: tuple[torch.nn.Module, ...]
    ddp: tuple[DistributedDataParallel, ...]
    dtype: torch.dtype
    hf: Mapping[str, Any]
    parallel: MegatronParallel
    mesh: Mesh
    switches: Switches
    adapter: Kind | None
    balance: Balance | None = None

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights, not copies, by local Megatron name, i.e. the storage names of `Family.megatron_layout`.

        A weight's dtype may differ from its storage's dtype in the layout: see `asyncmoe.weights.sender.sources`.
        """
        return {name: tensor.data for name, tensor in named_tensors(self)}

    def adapter_values(self) -> dict[str, torch.Tensor]:
        """Return this rank's halves of the adapter, not copies, by the names of `asyncmoe.trainer.lora.attach.parameters`."""
        return {name: parameter.data for name, parameter in attach.parameters(self.chunks).items()}


def build(hf: Mapping[str, Any], config: Config, mesh: Mesh) -> Model:
    """Build this rank's part with random weights; `load_hf` fills it. Weights are float32, or bfloat16 with float32 gradients and masters.

    Raises:
        ConfigError: the model does not support the adapter, or a requested Megatron switch cannot be on.
    """
    wanted = config.trainer.weights_dtype
    dtype = torch.bfloat16 if wanted == "bfloat16" or (wanted == "auto" and mesh.device.type != "cpu") else torch.float32
    on = layers.switches(hf, config, dtype)
    parallel = replace(trainer_parallel(config), te=on.transformer_engine)
    family_config, gpt = family_of(hf).megatron_config(hf)
    megatron_config = layers.transformer_config(family_config, config, mesh.device, dtype, on)
    chunks = tuple(
        GPTModel(
            config=megatron_config,
            transformer_layer_spec=layers.spec(megatron_config, on, chunk if mesh.vpp > 1 else None),
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
        attach.attach(chunks, megatron_config, shape, config.adapter, parallel, mesh.rank, config.run.seed)
    inner = [Float16Module(megatron_config, chunk) if dtype == torch.bfloat16 else chunk for chunk in chunks]
    for chunk in chunks:
        for _, bias in _selection_biases(chunk):
            bias.data = bias.data.float()  # undoes Float16Module's cast; Megatron does so only in a forward pass
        if on.gradient_accumulation_fusion:
            layers.fuse_gradient_accumulation(chunk)
    ddp = tuple(DistributedDataParallel(megatron_config, layers.ddp_config(config, on), chunk) for chunk in inner)
    for chunk in ddp:
        chunk.train()
    # Without no_sync_func the schedules reduce gradients after every micro-batch, and Megatron expects the same number of reductions in
    # every step.
    no_sync = [chunk.no_sync for chunk in ddp]
    megatron_config.no_sync_func = no_sync if len(ddp) > 1 else no_sync[0]
    rate = config.trainer.router_bias_rate
    balance = Balance(chunks, shape.layers, rate, (mesh.tp_rank, mesh.tp)) if shape.router_bias and rate else None
    return Model(megatron_config, chunks, ddp, dtype, hf, parallel, mesh, on, adapter_of(config, hf), balance)


def gather_weights(model: Model) -> None:
    """Gather all new weights now. With `overlap_param_gather` only the next forward pass would gather them, too late for code that reads
    them earlier. Collective over all ranks."""
    if model.switches.overlap_param_gather:
        for chunk in model.ddp:
            chunk.start_param_sync(force_sync=True)


def named_tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's weights under the names of `Model.weights`: the model's parameters, and the routers' selection biases, which are
    buffers. Adapters are not weights of the model and are excluded."""
    for number, chunk in enumerate(model.chunks):
        front = chunk_prefix(number, len(model.chunks))
        yield from ((front + name, parameter) for name, parameter in chunk.named_parameters() if not name.startswith(ADAPTERS))
        yield from ((front + name, bias) for name, bias in _selection_biases(chunk))


def _selection_biases(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))


def load_hf(model: Model, path: Path) -> None:
    """Fill this rank's weights from a Hugging Face checkpoint, one parameter at a time, reading only the tensors that belong to it.

    Raises:
        DataError: a tensor is missing or has another shape, or a file cannot be read.
        InvariantBroken: the layout table does not describe the model that was built.
    """
    checkpoint = HFCheckpoint(path)
    weights = model.weights()
    for name, value in local_tensors(model, checkpoint):
        weights[name].copy_(value)


def local_tensors(model: Model, checkpoint: HFCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's weights from a Hugging Face checkpoint, by local Megatron name; on the host, in the layout's dtypes."""
    family, dtype = family_of(model.hf), str(model.dtype).removeprefix("torch.")
    source = family.hf_layout(model.hf, dtype).at(0)
    local = family.megatron_layout(model.hf, model.parallel, model.mesh.rank, dtype).at(0)
    _check_layout(local, model.weights())
    pieces = local.pieces_by_storage
    each = [[RankLayout(0, {name: storage}, tuple(pieces[name]))] for name, storage in local.storages.items()]
    plans = plan_each(family.tensors(model.hf), [source], each)
    for name, steps in zip(local.storages, plans, strict=True):
        arrays = {n: checkpoint.read(n, one.shape, getattr(torch, one.dtype)) for n, one in steps.sources.get(0, {}).items()}
        value = torch.empty(local.storages[name].shape, dtype=getattr(torch, local.storages[name].dtype))
        exchange(steps, LocalTransport(), arrays, {name: value})
        yield name, value


def _check_layout(layout: RankLayout, built: Mapping[str, torch.Tensor]) -> None:
    described = {name: storage.shape for name, storage in layout.storages.items()}
    existing = {name: tuple(tensor.shape) for name, tensor in built.items()}
    differ = sorted(name for name in described.keys() | existing.keys() if described.get(name) != existing.get(name))
    if differ:
        name = differ[0]
        raise InvariantBroken(
            f"{name}: the layout table says {described.get(name)}, Megatron built {existing.get(name)} ({len(differ)} parameters differ)"
        )
