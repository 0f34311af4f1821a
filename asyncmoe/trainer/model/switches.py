"""Decides which of Megatron's switches a run turns on, from its configuration, this machine's kernels and the run's features.

A switch is on if it is possible and advisable; some can be set (`trainer.megatron`, under Megatron's names). For the requirements of
each switch see megatron-core 0.16.1: `TransformerConfig.__post_init__`, `DistributedDataParallel`, `extensions/transformer_engine.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncmoe.config import Config
from asyncmoe.config.trainer import TrainerSection
from asyncmoe.errors import ConfigError
from asyncmoe.models import family_of, kept_routing
from asyncmoe.models.latent import Latent
from asyncmoe.platform.kernels import Kernels
from asyncmoe.trainer.model import gpu_settings
from asyncmoe.trainer.model.gpu_settings import lacks_engine

_GROUPED_CAPABILITIES = (9, 10)
_ALIGNMENT = 16
"""torch's grouped matmul needs matrices whose row size is a multiple of this many bytes."""

Experts = Literal["transformer_engine", "torch", "sequential"]
"""The implementation of the experts: one kernel for all experts of a rank ("transformer_engine", "torch"), or one expert after another."""


@dataclass(frozen=True)
class RunFeatures:
    """The features of a run that decide its switches, besides the keys of `trainer`.

    Attributes:
        expert_widths: columns and rows of a rank's part of an expert's matrices, and the adapter's rank if any; () without experts.
        lora: adapters are trained and the weights are frozen.
        keeps_routing: rows are routed to the experts that the engines chose.
        latent: the model uses DeepSeek's latent attention.
        interleaved_rope: the rotary embedding rotates neighbouring dimensions together.
        float32: weights are float32.
        published_every: optimizer steps between published versions.
    """

    expert_widths: tuple[int, ...]
    lora: bool
    keeps_routing: bool
    latent: bool
    interleaved_rope: bool
    float32: bool
    published_every: int


def run_features(hf: Mapping[str, Any], config: Config, float32: bool) -> RunFeatures:
    """Return the features of a run that `decide` takes.

    Args:
        hf: the model's config.json.
        float32: whether the trainer's weights are float32.
    """
    family, expert_widths = family_of(hf), tuple[int, ...]()
    shape = family.shape_of(hf)
    if shape.experts:
        rank = () if config.adapter is None else (config.adapter.rank,)
        expert_widths = (shape.hidden, shape.expert_width // config.trainer.expert_tp, *rank)
    return RunFeatures(
        expert_widths=expert_widths,
        lora=config.adapter is not None,
        keeps_routing=kept_routing(config, hf) is not None,
        latent=isinstance(shape.attention, Latent),
        interleaved_rope=bool(family.megatron_config(hf)[0].get("rotary_interleaved")),
        float32=float32,
        published_every=config.sync.every,
    )


@dataclass(frozen=True)
class Switches:
    """The switches under Megatron's names, except for `experts`."""

    transformer_engine: bool
    experts: Experts
    moe_permute_fusion: bool
    moe_router_fusion: bool
    apply_rope_fusion: bool
    bias_activation_fusion: bool
    gradient_accumulation_fusion: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    flex: bool

    @property
    def text(self) -> str:
        """The switches that are on and off, for the log."""
        by_name = {name: value for name, value in vars(self).items() if isinstance(value, bool)}
        on, off = (", ".join(name for name, value in by_name.items() if value == wanted) for wanted in (True, False))
        return f"experts: {self.experts}; on: {on or 'nothing'}; off: {off or 'nothing'}"


def decide(trainer: TrainerSection, kernels: Kernels, run: RunFeatures) -> Switches:
    """Decide the switches of a run.

    Raises:
        ConfigError: the configuration requests an impossible setting.
    """
    wanted = trainer.megatron
    lacking = lacks_engine(kernels) if kernels.cuda else "there is no GPU"
    engine = not lacking and wanted.transformer_impl != "local"
    if wanted.transformer_impl == "transformer_engine" and lacking:
        raise _refusal("transformer_impl", "transformer_engine", "local", lacking)
    if trainer.cp > 1 and kernels.cuda and (not engine or run.float32):
        why = lacking or ("the weights are float32" if engine else "trainer.megatron.transformer_impl is local")
        raise ConfigError(
            "trainer.cp",
            got=trainer.cp,
            expected=f"1 because {why}: on a GPU, only Transformer Engine's 16-bit attention can divide sequences",
            hint=_WITHOUT,
        )
    gpu_settings.check(trainer, kernels, "" if engine else lacking or "transformer_impl is local")
    experts = _experts(wanted.moe_grouped_gemm, kernels, run, engine)
    if (cannot := _lacks_gather(trainer, run, experts)) and wanted.overlap_param_gather:
        raise _refusal("overlap_param_gather", "true", "false or null", cannot)
    flex = wanted.moe_token_dispatcher_type == "flex"
    if flex and (why := _lacks_flex(trainer, kernels, run)):
        raise _refusal("moe_token_dispatcher_type", "flex", "alltoall", why)
    fused = engine and bool(run.expert_widths)
    overlap = kernels.cuda and trainer.dp * trainer.cp > 1  # a CPU reduces and computes on the same cores
    return Switches(
        transformer_engine=engine,
        experts=experts,
        moe_permute_fusion=fused,
        # A fused router does not ask for recorded experts.
        moe_router_fusion=fused and not run.keeps_routing,
        # Megatron's kernel for latent attention is experimental and supports only YaRN. Its `fused_apply_rotary_pos_emb_thd` (0.16.1) does
        # not tell Transformer Engine that neighbouring dimensions rotate together, so it would rotate halves.
        apply_rope_fusion=engine and not run.latent and not run.interleaved_rope,
        bias_activation_fusion=_or(wanted.bias_activation_fusion, kernels.cuda),
        gradient_accumulation_fusion=engine and not run.lora,
        overlap_grad_reduce=_or(wanted.overlap_grad_reduce, overlap),
        # Publishing reads all weights: if it follows every step, there is nothing to overlap.
        overlap_param_gather=_or(wanted.overlap_param_gather, overlap and not cannot and run.published_every > 1),
        flex=flex,
    )


def _or(asked: bool | None, default: bool) -> bool:
    return default if asked is None else asked


_WITHOUT = "leave trainer.cp out, or install Transformer Engine (make setup GPU=1) and leave transformer_impl and trainer.dtype out"


def _refusal(name: str, got: str, expected: str, why: str) -> ConfigError:
    return ConfigError(f"trainer.megatron.{name}", got=got, expected=f"{expected} because {why}", hint="leave it out")


def _lacks_flex(trainer: TrainerSection, kernels: Kernels, run: RunFeatures) -> str:
    if not run.expert_widths:
        return "the model has no experts"
    if not kernels.cuda:
        return "there is no GPU"
    if kernels.lacks_deep_ep:
        return kernels.lacks_deep_ep
    return "rows do not travel between ranks: trainer.expert_tp and trainer.ep are 1" if trainer.expert_tp * trainer.ep == 1 else ""


def _experts(wanted: bool | None, kernels: Kernels, run: RunFeatures, engine: bool) -> Experts:
    """Return the implementation of the experts. torch has a grouped kernel for bfloat16 on Hopper and Blackwell (`_grouped_mm_cuda` of
    ATen/native/cuda/GroupedBlas.cpp). Elsewhere it multiplies matrix by matrix and reads the ends of the experts' rows on the host for each
    call, which is slower than one expert after another."""
    if not run.expert_widths:
        if wanted:
            raise _refusal("moe_grouped_gemm", "true", "false or null", "the model has no experts")
        return "sequential"
    if engine:
        if wanted is False:
            raise _refusal("moe_grouped_gemm", "false", "true or null", "Transformer Engine's experts are grouped")
        return "transformer_engine"
    cannot = _refuses_grouped(run)
    if wanted and cannot:
        raise _refusal("moe_grouped_gemm", "true", "false or null", cannot)
    fast = kernels.cuda and kernels.capability[0] in _GROUPED_CAPABILITIES and not run.float32
    return "torch" if not cannot and _or(wanted, fast) else "sequential"


def _refuses_grouped(run: RunFeatures) -> str:
    """Return why torch rejects the widths (`check_valid_strides_and_return_transposed` of torch's ATen/native/GroupedMMUtils.h), or ""."""
    multiple = _ALIGNMENT // (4 if run.float32 else 2)
    if all(width % multiple == 0 for width in run.expert_widths):
        return ""
    return f"a rank's part of an expert is {' and '.join(map(str, run.expert_widths))} wide, expected multiples of {multiple}"


def _lacks_gather(trainer: TrainerSection, run: RunFeatures, experts: Experts) -> str:
    """Return why `overlap_param_gather` is impossible, or "". Megatron waits for weights when their layer is called, but adapters are
    called by hooks, and torch multiplies all experts at once without calling them."""
    if not trainer.distributed_optimizer:
        return "the optimizer's state is not sharded"
    if run.lora:
        return "Megatron does not call adapters as layers"
    return "torch's grouped matmul reads expert weights without calling their layers" if experts == "torch" else ""


def megatron_arguments(switches: Switches) -> Mapping[str, object]:
    """Return the keyword arguments for TransformerConfig.

    `gradient_accumulation_fusion` is off here: Megatron's own output layer, which is used beside Transformer Engine's layers, refuses it
    without an apex extension (tensor_parallel/layers.py); see `asyncmoe.trainer.model.layers.fuse_gradient_accumulation`.
    """
    return {
        "moe_grouped_gemm": switches.experts == "transformer_engine",
        "moe_permute_fusion": switches.moe_permute_fusion,
        "moe_router_fusion": switches.moe_router_fusion,
        "apply_rope_fusion": switches.apply_rope_fusion,
        "bias_activation_fusion": switches.bias_activation_fusion,
        "gradient_accumulation_fusion": False,
        **({"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"} if switches.flex else {}),
    }
