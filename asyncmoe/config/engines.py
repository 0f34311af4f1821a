"""The SGLang servers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from asyncmoe.config import sglang_arguments
from asyncmoe.config.fields import NonNegative, NonNegativeSeconds, Port, Positive, Seconds, Section, refused


class EngineSection(Section):
    """The SGLang servers."""

    count: Positive = 1
    """Number of SGLang servers. With join: the number that must have joined before the run begins."""
    join: bool = False
    """true: you start engines with `asyncmoe engine`, on any machine and at any time, and they join the run. false: `asyncmoe run` starts
    them on its own machine."""
    tp: Positive = 1
    """Tensor-parallel ranks of an engine, one GPU each. Raise it if weights and KV cache do not fit."""
    ep: Positive = 1
    """Expert-parallel ranks of an engine; must divide tp."""
    dp_attention: Positive = 1
    """Data-parallel size of attention; must divide tp. Each of these groups of tp / dp_attention ranks holds all attention weights, and has
    requests and a KV cache of its own; experts are computed by all ranks together. Raise it for latent attention (DeepSeek-V3, Kimi-K2),
    for which every rank of a group caches the same: `asyncmoe plan` suggests a number."""
    nodes: Positive = 1
    """Machines over which the ranks of one engine are spread evenly; must divide tp. If above 1, `asyncmoe engine` runs on each of these
    machines, with the same --name and a different --node."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Dtype of the engine's weights; auto: the checkpoint's, or bfloat16 if its config.json names none."""
    python: Path | None = None
    """Python interpreter with SGLang; null: `.venv-engine` beside asyncmoe's environment, else asyncmoe's own Python."""
    port: Port = 0
    """First port: engine i of a machine listens on port + i. 0: any free ports."""
    first_gpu: NonNegative | None = None
    """First GPU of the engines on a machine: engine i takes tp GPUs starting at first_gpu + i * tp. null: the first GPU after the
    trainer's, or 0 with placement colocated or if engines and trainer are on different machines."""
    max_running: Positive = 16
    """Requests a server decodes at once; further requests wait in its queue. Lower it if the server retracts requests."""
    max_total_tokens: Positive | None = None
    """Tokens of a server's KV cache, over all groups of dp_attention; null: as many as fit, as estimated by `asyncmoe
    plan` if engines stage weights or placement is colocated, otherwise by SGLang."""
    start_timeout_s: Seconds = 180.0
    """Seconds processes wait for each other at the start. Raise it for large checkpoints on a slow file system."""
    hang_timeout_s: Seconds = Field(60.0, ge=12.0)
    """A hung engine is killed within this many seconds of its last token (of a request or a probe); its responses continue on other
    engines. Raise this if a forward pass can take a third of this time."""
    restarts: NonNegative = 3
    """How many times an engine that died or hung is restarted; 5 s pass before the first restart, twice as long before each next one. A
    restarted engine serves from the next version on. If all engines are lost, the trainer sends its weights again once one has restarted;
    with sync.method broadcast or disk, or sync.every above 1, the run ends instead."""
    orphan_s: NonNegativeSeconds = 60.0
    """Seconds that engines outlive a lost controller, waiting for the next one to take them over. Raise it if the controller takes long to
    start. 0: engines end with the controller, and losing the controller ends the run."""
    args: tuple[str, ...] = ()
    """Your own arguments for sglang.launch_server; those that asyncmoe does not support are refused."""

    @model_validator(mode="after")
    def _check_args(self) -> EngineSection:
        if why := sglang_arguments.refusal(self.args):
            raise ValueError(why)
        for key, size in {"ep": self.ep, "dp_attention": self.dp_attention, "nodes": self.nodes}.items():
            if self.tp % size:
                raise refused(f"engines.{key}", size, f"a divisor of engines.tp = {self.tp}", "change either key")
        return self

    @property
    def quantises(self) -> bool:
        """True if an engine quantises the weights that it loads, so that they differ from the checkpoint's."""
        return sglang_arguments.value(self.args, "--quantization") is not None

    @property
    def ranks_per_node(self) -> int:
        """Ranks of an engine on one of its nodes."""
        return self.tp // self.nodes
