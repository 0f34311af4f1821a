"""What makes trajectories: the model, the task, the engines, and the queue they end in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncmoe.config.fields import NonNegative, Port, Positive, PositiveFloat, Real, Section, Share, Switch

StalenessRule = Literal["drop", "requeue", "downweight"]
Unit = Literal["group", "trajectory"]


class MadeModel(Section):
    """A tiny random model to write at `model.path` when nothing is there yet (`asyncmoe make-model` writes the same)."""

    layers: Positive = Field(2, description="Decoder layers, each with experts.")
    hidden: Positive = Field(64, description="Entries of a hidden state.")
    heads: Positive = Field(4, description="Query heads.")
    kv_heads: Positive = Field(2, description="Key and value heads; a divisor of heads.")
    head_dim: Positive = Field(32, description="Entries of a head.")
    experts: Positive = Field(8, description="Experts of a layer.")
    experts_per_token: Positive = Field(2, description="Experts a token goes through.")
    expert_hidden: Positive = Field(64, description="Rows of an expert's gate and up.")
    context: Positive = Field(2048, description="Positions.")


class ModelSection(Section):
    """The Hugging Face checkpoint that training starts from."""

    path: Path = Field(description="Directory with config.json, safetensors and a tokenizer.")
    trust_remote_code: bool = Field(
        False, description="Run the Python that lies beside the checkpoint, which tokenizers such as Kimi-K2's and Moonlight's need."
    )
    make: MadeModel | None = Field(None, description="Write a tiny random Qwen3-MoE at `path` when it does not exist.")


class TaskSection(Section):
    """What is asked."""

    kind: Literal["arithmetic", "jsonl"] = Field(
        description="arithmetic: calculations drawn at random, without end; jsonl: the questions of a file."
    )
    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+",), description="arithmetic: operators drawn from.")
    difficulty: Positive = Field(1, description="arithmetic: decimal digits of each operand.")
    path: Path | None = Field(None, description='jsonl: file with one {"question": ..., "answer": ...} a line, as GSM8K.')
    chat_template: bool = Field(True, description="jsonl: put the question through the tokenizer's chat template.")

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

    groups_per_step: Positive = Field(16, description="Prompts in a training step.")
    group_size: Positive = Field(8, description="Responses to each prompt.")
    max_new_tokens: Positive = Field(16, description="Tokens of a response at most.")
    temperature: PositiveFloat = Field(1.0, description="Logits are divided by it, in engine and trainer alike.")
    top_p: Share = Field(1.0, description="Sample from the fewest tokens whose probabilities add up to it; 1: from all.")
    top_k: Positive | None = Field(None, description="Sample from the most probable tokens only; null: from all.")
    min_p: Annotated[Real, Field(ge=0, lt=1)] = Field(0.0, description="Leave out tokens below this share of the most probable one's.")
    max_concurrent: Positive = Field(64, description="Episodes in flight over all engines.")
    balance: Balance = Field(
        "least_loaded",
        description="Which engine a request goes to. least_loaded: the one with the fewest; prefix_affine: the same for all requests of a "
        "group, later turns of its episodes included, so that they find their prefix in its cache.",
    )
    affinity_slack: NonNegative = Field(
        8, description="prefix_affine: requests that engine may have beyond the least loaded one; a group that is too much overflows."
    )
    order: Order = Field(
        "fifo",
        description="Which request goes next where max_concurrent are in flight; what continues an episode goes before what is new. "
        "fifo: first come, first served; longest_first: prompts with long responses so far first.",
    )
    request_timeout_s: PositiveFloat = Field(
        300.0, description="How long an engine may take for a response; one that takes longer is rejected and its group started over."
    )
    interruption: Interruption = Field(
        "in_place",
        description="What becomes of responses under way when a version lands. in_place: they stand still and go on; retract: their keys "
        "and values are computed again (not with keep.routing); abort_resume: they end and are sent again as prefixes; abort_retry: they "
        "start again; drain: they finish first.",
    )
    filter_equal: bool = Field(
        False, description="Drop groups whose rewards are all equal, which carry no advantage, and go on with other prompts (DAPO)."
    )
    oversample: NonNegative = Field(
        0,
        description="Responses to each prompt beyond group_size: the first group_size that finish make the group, others are cancelled. "
        "Cuts the tail of the lengths, and so favours short responses: what is trained is biased towards them.",
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
        """Some tokens of the vocabulary cannot be sampled."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


class KeepSection(Section):
    """What engines record of how each token was sampled, for the trainer to train exactly that."""

    routing: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto",
        description="The experts every token went through in the engine; the trainer sends it through the same. auto: where the model has "
        "any.",
    )
    sampling_mask: Annotated[Literal["auto", "on", "off"], Switch] = Field(
        "auto",
        description="The ids every token was sampled from; the trainer's probabilities are over the same. auto: where rollout.top_p, top_k "
        "or min_p leave some out.",
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

    count: Positive = Field(1, description="Servers; where they join, how many the run waits for before it begins.")
    join: bool = Field(
        False,
        description="Engines are started by `asyncmoe engine`, on any machine and at any time, and join the run. Otherwise the controller "
        "starts them on its own.",
    )
    tp: Positive = Field(1, description="Tensor-parallel ranks of each.")
    ep: Positive = Field(1, description="Ranks its experts are spread over; a divisor of tp.")
    dtype: Literal["float32", "bfloat16", "auto"] = Field("auto", description="Of its weights; auto: SGLang's choice from the checkpoint.")
    python: Path | None = Field(
        None, description="Python that has SGLang; default: `.venv-engine` beside this environment, else this Python."
    )
    host: str = Field("127.0.0.1", description="Address it listens at; one that joins has that of cluster.network.")
    port: Port = Field(0, description="First port; engine i of a machine takes port + i. 0: any free ports.")
    first_gpu: NonNegative | None = Field(
        None,
        description="The first GPU that engines take on a machine: engine i has tp of them from first_gpu + i * tp on. null: the one "
        "behind the trainer's where the run has one machine, else 0.",
    )
    share_gpus: bool = Field(
        False,
        description="Engines and trainer of one machine compute on the same GPUs, from 0 on: the memory of each is divided between them by "
        "the arithmetic of `asyncmoe plan`, and weights travel over CUDA IPC. Without it a run in which they would meet on a GPU is "
        "refused.",
    )
    max_running: Positive = Field(16, description="Requests one server runs at once; the others wait in it.")
    max_total_tokens: Positive | None = Field(
        None, description="Tokens whose keys and values one server has room for; null: what SGLang finds room for."
    )
    start_timeout_s: PositiveFloat = Field(180.0, description="How long processes of a run wait for each other to start.")
    args: tuple[str, ...] = Field((), description="Further arguments for sglang.launch_server.")

    @model_validator(mode="after")
    def _check_args(self) -> EngineSection:
        for word in self.args:
            flag = word.partition("=")[0]
            if (key := _OWNED.get(flag)) is not None:
                way = f"set {key}" if key else "leave it out; asyncmoe sets it"
                raise ValueError(f"engines.args: got {flag}, expected none of the arguments asyncmoe gives an engine; {way}")
        return self


class StalenessSection(Section):
    """How old a trajectory may be, in versions."""

    eta: NonNegative = Field(1, description="Capacity law: start only while accepted + running < (eta + version + 1) * batch.")
    rule: StalenessRule = Field(
        "drop",
        description="What happens to a group whose oldest token is more than eta versions old when it would be trained. requeue: its "
        "prompt is started again. downweight: it is trained up to max_age, counting for less.",
    )
    downweight: Share | None = Field(None, description="downweight: each version beyond eta multiplies by this what a group counts for.")
    max_age: Positive | None = Field(None, description="downweight: a group with a token older than this many versions is dropped.")

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
        description="What the capacity law lets start. trajectory: single responses; one that an engine spoiled is started over alone.",
    )
    capacity: Positive | None = Field(None, description="Trajectories it holds before `put` waits; default (eta + 1) * batch.")
    lease_timeout_s: PositiveFloat = Field(600.0, description="How long the trainer waits for a batch before it gives up.")
