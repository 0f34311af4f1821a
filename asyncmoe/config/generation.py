"""Configuration of generation: the model, the task, rollouts, the engines, and the queue of trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NameOrPlugin, NonNegative, Port, Positive, PositiveFloat, Real, Section, Share, Switch

StalenessRule = Literal["drop", "requeue", "downweight"]
Unit = Literal["group", "trajectory"]


class MadeModel(Section):
    """A tiny random model, written to `model.path` if nothing is there (`asyncmoe make-model` writes the same)."""

    layers: Positive = Field(2, description="Decoder layers; each has experts.")
    hidden: Positive = Field(64, description="Width of a hidden state.")
    heads: Positive = Field(4, description="Query heads.")
    kv_heads: Positive = Field(2, description="Key and value heads; must divide heads.")
    head_dim: Positive = Field(32, description="Width of a head.")
    experts: Positive = Field(8, description="Experts per layer.")
    experts_per_token: Positive = Field(2, description="Experts the router chooses for a token.")
    expert_hidden: Positive = Field(64, description="Intermediate width of an expert: rows of its gate and up projections.")
    context: Positive = Field(2048, description="Context length, in tokens.")


class ModelSection(Section):
    """The Hugging Face checkpoint that training starts from."""

    path: Path = Field(description="Directory with config.json, safetensors files and a tokenizer.")
    family: Annotated[str, NameOrPlugin(("auto",))] = Field(
        "auto",
        description="Model family. auto: by model_type in config.json; or your own `Family` object (docs/guides/model-family.md).",
    )
    trust_remote_code: bool = Field(
        False, description="Run the Python code shipped with the checkpoint; the tokenizers of Kimi-K2 and Moonlight need it."
    )
    make: MadeModel | None = Field(None, description="Write a tiny random Qwen3-MoE to `path` if it does not exist.")


class TaskSection(Section):
    """Source of the questions and their reference answers."""

    kind: Literal["arithmetic", "jsonl"] = Field(
        description="arithmetic: random calculations, without end; jsonl: the questions of a file (`path`)."
    )
    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+",), description="arithmetic: operators to draw from.")
    difficulty: Positive = Field(1, description="arithmetic: decimal digits of each operand.")
    path: Path | None = Field(None, description='jsonl: file with one {"question": ..., "answer": ...} per line, as in GSM8K.')
    chat_template: bool = Field(
        True, description="jsonl: apply the tokenizer's chat template to the question; false for a base model without one."
    )

    @model_validator(mode="after")
    def _check(self) -> TaskSection:
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path: got nothing, expected the path of a JSONL file because task.kind is jsonl")
        if not self.operations:
            raise ValueError("task.operations: got an empty list, expected at least one of + - *")
        return self


Interruption = Literal["in_place", "retract", "abort_resume", "abort_retry", "drain"]
Balance = Literal["least_loaded", "prefix_affine"]
Order = Literal["fifo", "longest_first"]


class RolloutSection(Section):
    """How responses are sampled."""

    groups_per_step: Positive = Field(16, description="Prompts per training step. The batch is groups_per_step * group_size responses.")
    group_size: Positive = Field(8, description="Responses to each prompt, whose rewards are compared with each other; at least 2.")
    max_new_tokens: Positive = Field(16, description="Maximum tokens of a response. Raise it if responses are cut off before their answer.")
    temperature: PositiveFloat = Field(
        1.0,
        description="Sampling temperature: engine and trainer divide the logits by it. Raise it if the responses to a prompt all get the "
        "same reward.",
    )
    top_p: Share = Field(1.0, description="Sample only from the fewest tokens whose probabilities add up to this; 1: from all.")
    top_k: Positive | None = Field(None, description="Sample only from this many most probable tokens; null: from all.")
    min_p: Annotated[Real, Field(ge=0, lt=1)] = Field(
        0.0, description="Do not sample tokens less probable than this share of the most probable token's probability; 0: off."
    )
    max_concurrent: Positive = Field(
        64,
        description="Maximum requests in flight over all engines. Raise it together with engines.count or engines.max_running, or slots "
        "stay empty.",
    )
    balance: Balance = Field(
        "least_loaded",
        description="Which engine gets a request. least_loaded: the engine with the fewest requests; prefix_affine: one engine for all "
        "requests of a group, including later turns of its episodes, so that they find their prefix in its cache.",
    )
    affinity_slack: NonNegative = Field(
        8, description="prefix_affine: requests a group's engine may have above the least loaded engine; beyond, they go elsewhere."
    )
    order: Order = Field(
        "fifo",
        description="Which request goes next once max_concurrent are in flight; a request that continues an episode precedes a new one. "
        "fifo: first come, first served; longest_first: prompts whose responses have been long so far.",
    )
    request_timeout_s: PositiveFloat = Field(
        300.0, description="Seconds an engine may take for a response; a slower response is rejected and its group started over."
    )
    interruption: Interruption = Field(
        "in_place",
        description="What happens to responses in flight when a version lands. in_place: they pause and continue; retract: they pause, and "
        "their keys and values are recomputed (not with keep.routing); abort_resume: they are aborted and sent again as prefixes; "
        "abort_retry: they start again from the prompt; drain: they finish before the version lands.",
    )
    filter_equal: bool = Field(
        False,
        description="Drop groups whose rewards are all equal, since they carry no advantage, and sample other prompts (DAPO). Not with "
        "objective.advantage reinforce_plus_plus, to which they carry one.",
    )
    oversample: NonNegative = Field(
        0,
        description="Spare responses to each prompt beyond group_size: the first group_size to finish make the group, the others are "
        "cancelled. This cuts the tail of response lengths, and biases training towards short responses.",
    )

    @model_validator(mode="after")
    def _check(self) -> RolloutSection:
        together = self.group_size + self.oversample
        if self.oversample and self.max_concurrent < together:
            raise ValueError(
                f"rollout.max_concurrent: got {self.max_concurrent}, expected at least rollout.group_size + rollout.oversample = "
                f"{together} so that the extra responses do not wait for the others; raise it, or lower rollout.oversample"
            )
        return self

    @property
    def batch(self) -> int:
        """Trajectories in a training step."""
        return self.groups_per_step * self.group_size

    @property
    def truncated(self) -> bool:
        """True if top_p, top_k or min_p keep some tokens from being sampled."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


class KeepSection(Section):
    """What engines record about the sampling of each token, so that the trainer reproduces it exactly."""

    routing: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto",
        description="Keep routing: record the experts each token went through in the engine; the trainer sends it through the same "
        "experts. auto: on if the model has experts.",
    )
    sampling_mask: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto",
        description="Keep the sampling mask: record the ids each token was sampled from; the trainer normalises its probabilities over "
        "the same ids. auto: on if rollout.top_p, top_k or min_p exclude some. Needs rollout.top_k.",
    )


_OWNED = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "engines.tp"),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), "engines.ep"),
    **dict.fromkeys(("--model", "--model-path"), "model.path"),
    "--base-gpu-id": "engines.first_gpu",
    "--host": "engines.host",
    "--port": "engines.port",
    "--dtype": "engines.dtype",
    "--max-running-requests": "engines.max_running",
    "--random-seed": "run.seed",
    "--trust-remote-code": "model.trust_remote_code",
    **dict.fromkeys(("--device", "--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--weight-version"), ""),
    **dict.fromkeys(("--custom-weight-loader", "--skip-tokenizer-init", "--api-key", "--pp", "--pp-size", "--pipeline-parallel-size"), ""),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), ""),
}
"""Arguments of SGLang's server that follow from the configuration -> the key that sets them; empty: none does."""


class EngineSection(Section):
    """The SGLang servers."""

    count: Positive = Field(1, description="SGLang servers. With join, the number that must have joined before the run begins.")
    join: bool = Field(
        False,
        description="true: `asyncmoe engine` starts engines, on any machine and at any time, and they join the run. false: the controller "
        "starts them on its own machine.",
    )
    tp: Positive = Field(1, description="Tensor-parallel ranks of an engine, one GPU each. Raise it if weights and KV cache do not fit.")
    ep: Positive = Field(1, description="Expert-parallel ranks of an engine; must divide tp.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto", description="Dtype of the engine's weights; auto: SGLang's choice from the checkpoint."
    )
    python: Path | None = Field(
        None, description="Python interpreter with SGLang; null: `.venv-engine` beside this environment, else this Python."
    )
    host: str = Field("127.0.0.1", description="Address a server listens on; an engine that joins uses the address of cluster.network.")
    port: Port = Field(0, description="First port: engine i of a machine listens on port + i. 0: any free ports.")
    first_gpu: NonNegative | None = Field(
        None,
        description="First GPU of the engines on a machine: engine i takes tp GPUs starting at first_gpu + i * tp. null: the first GPU "
        "after the trainer's if the run has one machine (0 with share_gpus), else 0.",
    )
    share_gpus: bool = Field(
        False,
        description="Engines and trainer of one machine share GPUs, starting at GPU 0: the arithmetic of `asyncmoe plan` divides the "
        "memory of each, and weights travel over CUDA IPC. false: a run in which an engine and the trainer would use one GPU is refused.",
    )
    max_running: Positive = Field(
        16, description="Requests a server decodes at once; further requests wait in its queue. Lower it if the server retracts requests."
    )
    max_total_tokens: Positive | None = Field(
        None, description="Size of a server's KV cache, in tokens; null: what fits, by SGLang or by the arithmetic of `asyncmoe plan`."
    )
    start_timeout_s: PositiveFloat = Field(
        180.0, description="Seconds processes wait for each other at the start. Raise it for large checkpoints on a slow file system."
    )
    args: tuple[str, ...] = Field((), description="Further command-line arguments for sglang.launch_server.")

    @model_validator(mode="after")
    def _check_args(self) -> EngineSection:
        for word in self.args:
            flag = word.partition("=")[0]
            if (key := _OWNED.get(flag)) is not None:
                way = f"set {key}" if key else "leave it out; asyncmoe sets it"
                raise ValueError(f"engines.args: got {flag}, expected none of the arguments asyncmoe gives an engine; {way}")
        return self


class StalenessSection(Section):
    """Staleness: how many versions a trained token may be behind the trainer."""

    eta: NonNegative = Field(
        1,
        description="Versions a trained token may be behind. Capacity law: a response starts only while accepted + running < "
        "(eta + version + 1) * batch. Raise it if engines and trainer wait for each other; lower it if too many ratios are clipped.",
    )
    rule: StalenessRule = Field(
        "drop",
        description="What happens to a group whose oldest token is more than eta versions old when its turn to train comes. drop: it is "
        "discarded. requeue: its prompt is sampled again. downweight: it is trained with less weight, up to max_age.",
    )
    downweight: Share | None = Field(None, description="downweight: factor on a group's weight for each version beyond eta.")
    max_age: Positive | None = Field(None, description="downweight: drop a group with a token older than this many versions.")

    @model_validator(mode="after")
    def _check(self) -> StalenessSection:
        for name, value in (("downweight", self.downweight), ("max_age", self.max_age)):
            if self.rule == "downweight" and value is None:
                what = "a factor of at most 1" if name == "downweight" else f"a number above queue.staleness.eta = {self.eta}"
                raise ValueError(
                    f"queue.staleness.{name}: got nothing, expected {what} because queue.staleness.rule is downweight; give both"
                )
            if self.rule != "downweight" and value is not None:
                raise ValueError(
                    f"queue.staleness.{name}: got {value}, expected nothing because queue.staleness.rule is {self.rule}; leave it out, or "
                    "set the rule to downweight"
                )
        if self.max_age is not None and self.max_age <= self.eta:
            raise ValueError(
                f"queue.staleness.max_age: got {self.max_age}, expected more than queue.staleness.eta = {self.eta}; raise it, or set "
                "queue.staleness.rule to drop"
            )
        return self


class QueueSection(Section):
    """The bounded queue between engines and trainer."""

    staleness: StalenessSection = StalenessSection()
    admission: Unit = Field(
        "group",
        description="Unit that the capacity law admits. group: all responses to a prompt together. trajectory: single responses; a "
        "response that an engine failed is started over alone.",
    )
    capacity: Positive | None = Field(
        None, description="Trajectories the queue holds before adding waits; null: (eta + 1) * batch. Lower it to save memory."
    )
    lease_timeout_s: PositiveFloat = Field(
        600.0, description="Seconds the trainer waits for a batch before the run fails. Raise it if responses are long."
    )
