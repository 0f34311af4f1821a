"""What is trained from them: the Megatron process group, its optimizer, the warm-up, and how new weights leave it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import Decay, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class OptimizerSection(Section):
    """Adam, its schedule and gradient clipping."""

    lr: PositiveFloat = Field(1e-6, description="Learning rate, after warmup_steps.")
    min_lr: NonNegativeFloat = Field(0.0, description="What it decays to at run.steps.")
    warmup_steps: NonNegative = Field(0, description="Steps in which it grows from 0.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="How it goes from lr to min_lr; constant: not at all.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Adam's decay of the mean gradient and of its square.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(0.0, description="AdamW's, times the learning rate.")
    clip_grad: PositiveFloat = Field(1.0, description="Norm of the gradient at most.")
    distributed: bool | None = Field(
        None,
        description="Shard the optimizer's state over data-parallel ranks (Megatron's distributed optimizer). null: where there are "
        "several, except in a run that goes on from a checkpoint that has it otherwise.",
    )


class MegatronSection(Section):
    """Megatron's switches under Megatron's names. null: on where this machine has what it needs and the run lets it be right; the log
    names each that is off, and why. true where it cannot be is refused before the model is built."""

    transformer_impl: Literal["transformer_engine", "local"] | None = Field(
        None, description="Whose layers the model is built from: Transformer Engine's, or Megatron's own. null: the former where it is."
    )
    moe_grouped_gemm: bool | None = Field(
        None,
        description="Multiply the rows of all experts of a rank in one call: Transformer Engine's, or without it torch's, "
        "which is fast in bfloat16 on Hopper and Blackwell. false: one expert after the other.",
    )
    moe_permute_fusion: bool | None = Field(None, description="Sort rows by expert in one kernel; needs Transformer Engine 2.1.")
    moe_router_fusion: bool | None = Field(
        None, description="Choose experts in one kernel; needs Transformer Engine 2.7, and routing that is not kept."
    )
    apply_rope_fusion: bool | None = Field(None, description="Turn queries and keys in one kernel; needs Transformer Engine 1.4.")
    bias_activation_fusion: bool | None = Field(
        None, description="SwiGLU and the router's weights in one compiled kernel, which keeps its input only; needs a GPU."
    )
    gradient_accumulation_fusion: bool | None = Field(
        None, description="Add gradients of weights to the step's as they are multiplied; needs Transformer Engine and all weights trained."
    )
    overlap_grad_reduce: bool | None = Field(
        None, description="Add gradients over data-parallel ranks during the last backward pass. null: on GPUs with several such ranks."
    )
    overlap_param_gather: bool | None = Field(
        None,
        description="Gather new weights during the next forward pass; needs the distributed optimizer. null: not where weights are "
        "published after every step, which reads all of them.",
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = Field(
        "alltoall", description="What carries rows to the ranks of their experts: alltoall: NCCL; flex: DeepEP, which has to be installed."
    )


Recomputed = Literal["core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts", "moe_act"]
"""Parts of a layer that Megatron can compute again by themselves."""


class TrainerSection(Section):
    """The Megatron process group."""

    ranks: Positive = Field(1, description="Processes torchrun starts on this machine.")
    tp: Positive = Field(1, description="Tensor parallelism; its ranks also share the sequence between the layers.")
    pp: Positive = Field(1, description="Pipeline stages.")
    ep: Positive = Field(1, description="Ranks the experts of a layer are spread over.")
    cp: Positive = Field(1, description="Context parallelism; only 1.")
    vpp: Positive = Field(1, description="Model chunks a pipeline stage holds: Megatron's interleaved schedule.")
    first_stage_layers: Positive | None = Field(None, description="Layers of the first pipeline stage; default: an equal share.")
    last_stage_layers: Positive | None = Field(None, description="Layers of the last pipeline stage; default: an equal share.")
    etp: Positive | None = Field(None, description="Expert tensor parallelism; default 1 when ep > 1, else tp.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field("auto", description="auto: float32 on CPU, bfloat16 on GPU.")
    pack: bool = Field(True, description="Pack sequences of a micro-batch into one row; false: one sequence a micro-batch.")
    tokens_per_microbatch: Positive = Field(4096, description="Upper bound of a packed micro-batch; a longer sequence gets its own.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="full: keep a layer's input only and compute the rest again in the backward pass: less memory, more time; selective: "
        "only the parts in recompute_modules (`asyncmoe plan` counts memory as for none).",
    )
    recompute_modules: tuple[Recomputed, ...] = Field(
        ("moe",),
        description="Megatron's: core_attn, mla_up_proj, layernorm, mlp (of dense layers), moe (router, experts and what travels), "
        "shared_experts, moe_act (needs Transformer Engine's experts). For recompute: selective.",
    )
    router_bias_rate: NonNegativeFloat = Field(
        0.0,
        description="How far a step moves the bias by which a router prefers an expert, of models that have such biases: up where the "
        "expert got fewer of the step's tokens than the mean, down where more. 0: biases stay as they are.",
    )
    optimizer: OptimizerSection = OptimizerSection()
    megatron: MegatronSection = MegatronSection()
    checkpoint_every: NonNegative = Field(0, description="Steps between checkpoints; 0: only at the end and on Ctrl-C.")
    keep_checkpoints: Positive = Field(2, description="So many of the newest stay on disk.")
    timeout_s: PositiveFloat = Field(600.0, description="Collectives that wait longer than this end the run.")

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else (1 if self.ep > 1 else self.tp)

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tp * self.pp)

    @property
    def distributed_optimizer(self) -> bool:
        """Whether the optimizer's state is sharded: as `optimizer.distributed` says, or where there are several data-parallel ranks."""
        return self.dp > 1 if self.optimizer.distributed is None else self.optimizer.distributed

    @model_validator(mode="after")
    def _check(self) -> TrainerSection:
        if self.ranks % (self.tp * self.pp):
            raise ValueError(
                f"trainer.ranks: got {self.ranks}, expected a multiple of tp * pp = {self.tp * self.pp}; change trainer.ranks, tp or pp"
            )
        experts = self.expert_tp * self.ep * self.pp
        if self.ranks % experts:
            raise ValueError(f"trainer.ranks: got {self.ranks}, expected a multiple of etp * ep * pp = {experts}; change trainer.ep or etp")
        if self.ep == 1 and self.expert_tp != self.tp:
            raise ValueError(
                f"trainer.etp: got {self.expert_tp}, expected tp = {self.tp} because ep is 1 (megatron-core 0.16 does not reduce "
                "expert gradients over tp otherwise); leave etp out or raise ep"
            )
        if self.cp > 1:
            raise ValueError(
                f"trainer.cp: got {self.cp}, expected 1; context parallelism needs an attention that gathers keys and values from other "
                "ranks, which the trainer does not have; raise trainer.tp for longer sequences"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"trainer.vpp: got {self.vpp}, expected 1 because trainer.pp is 1; raise trainer.pp or leave it out")
        for key in ("first_stage_layers", "last_stage_layers"):
            if self.pp == 1 and getattr(self, key) is not None:
                raise ValueError(f"trainer.{key}: got {getattr(self, key)}, expected nothing because trainer.pp is 1; leave it out")
        return self


class WarmupSection(Section):
    """Supervised steps on the task's own demonstrations before reinforcement learning."""

    steps: NonNegative = Field(0, description="Optimizer steps; 0: none.")
    batch: Positive = Field(64, description="Demonstrations in a step.")
    lr: PositiveFloat = Field(1e-3, description="Learning rate, constant.")
    wrong_share: float = Field(
        0.0, ge=0, lt=1, description="arithmetic: share of demonstrations with a wrong answer, an imperfect teacher to improve on."
    )


class SyncSection(Section):
    """How new weights reach the engines."""

    method: Literal["reshard", "broadcast"] = Field(
        "reshard",
        description="reshard: every engine rank gets its own bytes from the ranks that have them while it generates, and pauses to swap; "
        "broadcast: rank 0 gathers whole tensors and sends all of them to every engine, which stands still.",
    )
    transport: Literal["auto", "shm", "gloo", "nccl", "ipc"] = Field(
        "auto",
        description="How reshard's messages travel. Between CPUs, shm: memory that processes of one host share; gloo: TCP. Between GPUs, "
        "nccl; ipc: memory of GPUs of one host. auto: shm; or nccl, and ipc with engines.share_gpus.",
    )
    staging: bool = Field(
        True,
        description="Whether engines receive a version into memory of its own while they generate. Without, reshard writes their "
        "parameters while they stand still.",
    )
    every: Positive = Field(1, description="Optimizer steps between versions.")
    bucket_bytes: Positive = Field(256 << 20, description="Bound of a rank's messages under way; there are two such buckets.")
    nccl_max_ctas: Positive = Field(
        8,
        description="Multiprocessors of a GPU that NCCL may take from an engine that generates, or from the step, to move weights: it "
        "is given to each engine's communicator as maxCTAs. With more than 16 engines each gets fewer, 4 at least.",
    )
    verify_every: NonNegative = Field(0, description="Compare the engines' checksums with the trainer's weights every n updates; 0: never.")
    timeout_s: PositiveFloat = Field(300.0, description="How long each part of an update may take.")


class VerifySection(Section):
    """Checks that engine and trainer agree, and when not to train."""

    logprobs_every: NonNegative = Field(
        0,
        description="Compare engine and trainer every n steps, by a forward pass of its own, on the trajectories of the trainer's version, "
        "and log the tokens that differ most, with their neighbours and experts; 0: never.",
    )
    show: Positive = Field(3, description="How many tokens the log names.")
    max_logprob_diff: PositiveFloat | None = Field(
        None, description="The run ends before it trains on a batch with a larger |engine - trainer| at equal version, in nats; null: any."
    )
    max_kl: PositiveFloat | None = Field(
        None, description="The same for the mean KL(engine || trainer) over those tokens, in nats a token; null: any."
    )

    @model_validator(mode="after")
    def _check(self) -> VerifySection:
        for key in ("max_logprob_diff", "max_kl"):
            if getattr(self, key) is not None and not self.logprobs_every:
                raise ValueError(
                    f"verify.{key}: got {getattr(self, key)}, expected null because verify.logprobs_every is 0; set it to 1 or more"
                )
        return self
