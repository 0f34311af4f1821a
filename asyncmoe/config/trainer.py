"""The Megatron process group: parallel sizes, memory, checkpoints, optimizer, and Megatron's own switches."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import Decay, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seconds, Section, refused, said
from asyncmoe.errors import ConfigError

Moment = Literal["float32", "bfloat16"]
"""Dtype in which Adam keeps an average of gradients."""
Recomputed = Literal["core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts", "moe_act"]
"""Parts of a layer that Megatron can recompute separately."""


class OptimizerSection(Section):
    """Adam, its schedule and gradient clipping."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warmup_steps. The default suits large models; tiny ones need about 1e-3."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay, after the last step."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises linearly to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr to min_lr; constant: no decay."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's decay rates of the mean gradient and of the mean squared gradient."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay, multiplied by the learning rate; not applied to norms."""
    clip_grad: PositiveFloat = 1.0
    """Clip the gradient to this norm."""
    distributed: bool | None = None
    """Shard the optimizer's state over data-parallel ranks (Megatron's distributed optimizer). null: shard if there are several such ranks.
    A run may resume with another setting."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        if self.decay != "constant" and self.min_lr > self.lr:
            raise refused("trainer.optimizer.min_lr", f"{self.min_lr:g}", f"at most lr = {self.lr:g}; lower it")
        return self


class MemorySection(Section):
    """Ways, besides recomputation, to save the trainer's GPU memory at the cost of time; see docs/guides/memory.md. All need a GPU and a
    sharded optimizer state (optimizer.distributed)."""

    optimizer_offload: Fraction = 0.0
    """Share of the optimizer's state (float32 weights and Adam's averages, 12 bytes a parameter) kept in host memory and updated by the CPU
    (Megatron's HybridDeviceOptimizer), by threads on as many cores as the machine has for each of its ranks; a value of OMP_NUM_THREADS
    wins. In host memory a parameter takes 16 bytes, gradient included."""
    exp_avg_dtype: Moment = "float32"
    """Dtype of Adam's averages of gradients; bfloat16 saves 2 bytes a parameter, needs Transformer Engine, and excludes optimizer_offload.
    Checkpoints always hold float32, so a run can resume with another dtype."""
    exp_avg_sq_dtype: Moment = "float32"
    """As exp_avg_dtype, for the averages of squared gradients."""

    @property
    def low_precision(self) -> bool:
        """True if an average is not float32."""
        return "bfloat16" in (self.exp_avg_dtype, self.exp_avg_sq_dtype)

    @property
    def precision_aware(self) -> bool:
        """True if Megatron's precision-aware optimizer is used. It keeps float32 weights itself, so offloaded weights leave no copy on the
        GPU."""
        return self.low_precision or self.optimizer_offload > 0


class MegatronSection(Section):
    """Megatron's switches, under Megatron's names. null: the switch is on if this machine supports it and the run computes correctly with
    it. Megatron's other switches are set by the same rule; the trainer's log names them. A switch set to true that cannot be on is refused
    before the model is built."""

    transformer_impl: Literal["transformer_engine", "local"] | None = None
    """Layers the model is built from: Transformer Engine's or Megatron's own. null: Transformer Engine if installed."""
    moe_grouped_gemm: bool | None = None
    """Compute all experts of a rank in one grouped matrix multiplication: Transformer Engine's, else torch's, which is fast in bfloat16
    on Hopper and Blackwell. false: one expert after the other."""
    bias_activation_fusion: bool | None = None
    """Apply SwiGLU and the router's weights in one compiled kernel, which keeps only its input for the backward pass; needs a GPU."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over data-parallel ranks during the last backward pass. null: true on GPUs with several such ranks."""
    overlap_param_gather: bool | None = None
    """Gather new weights during the next forward pass; needs the distributed optimizer. null: off with sync.every 1, since publishing reads
    all weights."""
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = "alltoall"
    """Transport of tokens to the ranks of their experts. alltoall: NCCL; flex: DeepEP, whose package deep_ep you install; 1.2.1 has what
    Megatron imports, DeepEP 2 and sgl-deep-ep lack it."""


class TrainerSection(Section):
    """The Megatron process group: parallel sizes, micro-batches, memory and checkpoints."""

    ranks: Positive = 1
    """Trainer ranks, one process (and GPU) each; a multiple of tp * cp * pp. Data-parallel size: ranks / (tp * cp * pp)."""
    tp: Positive = 1
    """Tensor-parallel ranks; where they do not divide weights, they divide the sequence (sequence parallelism)."""
    pp: Positive = 1
    """Pipeline-parallel stages."""
    ep: Positive = 1
    """Expert-parallel ranks: the experts of a layer are spread over them. Must divide the number of experts."""
    cp: Positive = 1
    """Context-parallel ranks: every sequence, padded to a multiple of 2 * cp tokens, is divided among them. Raise it if a sequence's
    activations do not fit on one rank. Above 1, GPUs need Transformer Engine."""
    vpp: Positive = 1
    """Virtual pipeline parallelism: model chunks per stage, for Megatron's interleaved schedule."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: an equal share."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: an equal share."""
    etp: Positive | None = None
    """Tensor-parallel ranks of an expert; null: 1 if ep > 1, else tp."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Dtype of weights and activations; auto: float32 on CPU, bfloat16 on GPU."""
    precision: Literal["fp8"] | None = None
    """Precision of computation in layers; null: dtype. fp8: linear layers and experts multiply in float8 (Transformer Engine's blockwise
    recipe, E4M3, as in DeepSeek-V3); weights are kept, saved and sent in bfloat16; embedding, output layer, routers, norms and attention
    compute in bfloat16. Needs Hopper or newer and Transformer Engine. Scales of blocks are float32 on Hopper, as in engines, and powers of
    two on newer GPUs."""
    edge_layers: NonNegative = 1
    """With precision fp8: number of layers at each end of the model that stay in bfloat16 (Megatron's first_last_layers_bf16)."""
    pack: bool = True
    """Pack several sequences into a micro-batch; false: one sequence per micro-batch."""
    tokens_per_microbatch: Positive = 4096
    """Maximum tokens of a packed micro-batch; a longer sequence gets a micro-batch of its own. Lower it if GPU memory runs out; raise it
    for speed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: less memory, more time. full: save only a layer's input and recompute the rest in the backward pass;
    selective: recompute only the parts in recompute_modules."""
    recompute_modules: tuple[Recomputed, ...] = ("moe",)
    """Parts to recompute if recompute is selective, by Megatron's names. mlp: of dense layers; moe: router, experts and dispatched tokens.
    layernorm and moe_act need Transformer Engine."""
    router_bias_rate: NonNegativeFloat = 0.0
    """Amount by which a step changes each of the router's expert biases, if the model has them: up if the expert got fewer tokens than the
    mean, down if it got more. 0: biases are frozen."""
    optimizer: OptimizerSection = OptimizerSection()
    memory: MemorySection = MemorySection()
    megatron: MegatronSection = MegatronSection()
    sleep: tuple[Literal["optimizer", "gradients", "parameters"], ...] = ("optimizer", "gradients", "parameters")
    """With placement colocated: what leaves the trainer's GPUs while engines generate. What you leave out saves time and stays, so engines
    have less memory. optimizer and parameters move to host memory; gradients are dropped."""
    checkpoint_every: NonNegative = 0
    """Steps between checkpoints, and so the most steps that a crash can lose; 0: checkpoints only after the warm-up, at the end and on
    Ctrl-C."""
    async_save: bool = False
    """Write checkpoints while training goes on: training pauses only while each rank copies its state to host memory. The copy takes as
    much host memory as the rank's checkpoint files (see `asyncmoe plan`)."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints kept on disk; older ones are deleted, except those that keep_every keeps."""
    keep_every: NonNegative = 0
    """Steps between checkpoints that are never deleted: the first one at or after each multiple of this number. 0: no checkpoint is
    exempt."""
    checkpoint_copy: str | None = Field(None, min_length=1)
    """fsspec URL of a second location (s3://bucket/folder, file:///mnt/backup): each new checkpoint is copied there, to a folder named
    after run.dir. `asyncmoe checkpoints RUN --restore URL` restores a copy. null: no copies."""
    timeout_s: Seconds = 600.0
    """Seconds a collective of the trainer ranks may wait before the run fails."""
    max_restarts: NonNegative = 2
    """How many times in a row, without a new step in between, a trainer that lost a rank is restarted in place, from its newest checkpoint,
    while controller and engines go on. 0: losing the trainer ends the run."""

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else (1 if self.ep > 1 else self.tp)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def distributed_optimizer(self) -> bool:
        """True if the optimizer's state is sharded: `optimizer.distributed` or, if that is null, whether several ranks hold the same
        weights or `memory` needs it."""
        given = self.optimizer.distributed
        return self.dp * self.cp > 1 or self.memory.precision_aware if given is None else given

    @property
    def weights_dtype(self) -> Literal["float32", "bfloat16", "auto"]:
        """The dtype of weights that follows from `dtype` and `precision`."""
        return "bfloat16" if self.precision == "fp8" else self.dtype

    @property
    def needs_gpu(self) -> tuple[tuple[str, str], ...]:
        """The keys whose values need a GPU, and those values."""
        memory = self.memory
        found = {
            "memory.optimizer_offload": f"{memory.optimizer_offload:g}" if memory.optimizer_offload else "",
            "memory.exp_avg_dtype": memory.exp_avg_dtype if memory.exp_avg_dtype != "float32" else "",
            "memory.exp_avg_sq_dtype": memory.exp_avg_sq_dtype if memory.exp_avg_sq_dtype != "float32" else "",
            "precision": self.precision or "",
        }
        return tuple((f"trainer.{key}", value) for key, value in found.items() if value)

    @model_validator(mode="after")
    def _check(self) -> TrainerSection:
        if self.ranks % (self.tp * self.cp * self.pp):
            expected = f"a multiple of tp * cp * pp = {self.tp * self.cp * self.pp}; change trainer.ranks, tp, cp or pp"
            raise refused("trainer.ranks", self.ranks, expected)
        experts = self.expert_tp * self.ep * self.pp
        if self.ranks % experts:
            raise refused("trainer.ranks", self.ranks, f"a multiple of etp * ep * pp = {experts}; change trainer.ep or etp")
        if self.ep == 1 and self.expert_tp != self.tp:
            expected = f"tp = {self.tp} because ep is 1 (megatron-core 0.16 does not reduce expert gradients over tp otherwise)"
            raise refused("trainer.etp", self.expert_tp, expected, "leave etp out or raise ep")
        if self.vpp > 1 and self.pp == 1:
            raise refused("trainer.vpp", self.vpp, "1 because trainer.pp is 1; leave it out or raise trainer.pp")
        if self.precision == "fp8" and self.dtype == "float32":
            expected = "bfloat16 because trainer.precision is fp8; leave it out, and run on a GPU, which fp8 needs"
            raise refused("trainer.dtype", "float32", expected)
        self._check_memory()
        for key in ("first_stage_layers", "last_stage_layers"):
            if self.pp == 1 and getattr(self, key) is not None:
                raise refused(f"trainer.{key}", getattr(self, key), "nothing because trainer.pp is 1; leave it out")
        return self

    def _check_memory(self) -> None:
        """Refuse combinations that Megatron's optimizer does not support."""
        key, value = next((one for one in self.needs_gpu if ".memory." in one[0]), ("", ""))
        if key and self.optimizer.distributed is False:
            hint = f"with a GPU, leave it out; without a GPU, leave {key} out, which needs one"
            raise refused("trainer.optimizer.distributed", "false", f"true or null because {key} needs a sharded optimizer", hint)
        if key and self.weights_dtype == "float32":
            hint = f"{key} needs a GPU: with one, set trainer.dtype=bfloat16; without one, leave {key} out"
            raise refused(key, value, f"{_default(key)} because trainer.dtype is float32", hint)
        if self.memory.optimizer_offload and self.memory.low_precision:
            expected = "0 because exp_avg_dtype or exp_avg_sq_dtype is bfloat16, and the CPU's Adam keeps float32"
            hint = "set only one of these keys; each needs a GPU"
            raise refused("trainer.memory.optimizer_offload", f"{self.memory.optimizer_offload:g}", expected, hint)


def no_gpu_for(key: str, value: str) -> ConfigError:
    """Return the refusal of a key on a machine without a GPU."""
    return ConfigError(key, got=f"{value} on a machine without a GPU", expected=_default(key), hint="leave it out, or run on a GPU")


def _default(key: str) -> str:
    return said(attrgetter(key.removeprefix("trainer."))(TrainerSection()))
