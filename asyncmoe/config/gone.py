"""Keys of releases that were removed, and what to do instead.

A removed key is ignored if its value is harmless (`Gone.idle`), so that a run can start from the configuration of an older run, which lists
every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAST = "64a8fbaf"
"""Last commit that has all removed keys."""


@dataclass(frozen=True)
class Gone:
    """A removed key.

    Attributes:
        instead: what to do instead; follows "expected" in the message.
        idle: values that are ignored instead of refused; None: all values.
    """

    instead: str
    idle: tuple[Any, ...] | None


ANY = None
_FUSED = "nothing: it is on where Transformer Engine has it and computes correctly; trainer.megatron.transformer_impl=local turns it off"
_OUTAGE = "nothing: a scorer that cannot be reached is retried until scoring.deadline_s"

_ROWS: tuple[tuple[str, str, tuple[Any, ...] | None], ...] = (
    (
        "cluster.max_clock_skew_s",
        "nothing: clocks of two machines may differ by ten seconds; synchronise them (chronyc tracking, timedatectl)",
        (10.0,),
    ),
    ("engines.host", "nothing: a server listens on the address of cluster.network", ("127.0.0.1",)),
    ("engines.share_gpus", "placement=colocated, with which trainer and engines use the same GPUs in turn", (False,)),
    ("evaluation.min_p", "rollout.min_p, which evaluations use too", (None,)),
    ("evaluation.top_k", "rollout.top_k, which evaluations use too", (None,)),
    ("lora.dropout", "nothing: engines sample without dropout, and what is sampled is what is trained", (0.0,)),
    ("queue.admission", "nothing: all responses to a prompt start together", ("group",)),
    ("rollout.affinity_slack", "nothing: a request goes to the engine of its conversation, else to the one with the fewest requests", ANY),
    ("rollout.balance", "nothing: a request goes to the engine of its conversation, else to the least loaded one", ("least_loaded",)),
    ("rollout.oversample", "nothing: a group waits for all its responses; the first to finish would be the short ones", (0,)),
    ("run.resume", "nothing: the same command resumes the run; another run.dir starts a new one", (True,)),
    ("scoring.backoff_s", "nothing: half a second before the first retry, twice as long before each further one, up to 30", ANY),
    ("scoring.breaker_failures scoring.breaker_cooldown_s", _OUTAGE, ANY),
    ("sync.staging", "nothing: a whole version is staged where memory allows, else engines pause for it", (True,)),
    ("telemetry.live", "nothing: a line for each step, on a terminal and elsewhere", ANY),
    ("telemetry.mlflow.uri", "the address in the variable MLFLOW_TRACKING_URI", (None,)),
    ("telemetry.nvtx", "nothing: nsys profile --pytorch=autograd-nvtx names the parts of a step", (False,)),
    ("trainer.megatron.moe_permute_fusion trainer.megatron.moe_router_fusion", _FUSED, (None,)),
    ("trainer.megatron.apply_rope_fusion trainer.megatron.gradient_accumulation_fusion", _FUSED, (None,)),
    (
        "verify.logprobs_every",
        "nothing: verify.max_logprob_diff and verify.anomalies.kl_engine check every step, without another forward pass",
        ANY,
    ),
    ("verify.max_kl", "verify.anomalies.kl_engine.above", (None,)),
    ("verify.show", "nothing: the samples in report.html show the tokens on which engine and trainer differ", ANY),
)
"""Names of keys separated by spaces, `Gone.instead` and `Gone.idle`."""
KEYS = {key: Gone(instead, idle) for keys, instead, idle in _ROWS for key in keys.split()}
"""Removed keys."""

VALUES: Mapping[tuple[str, str | int], str] = {
    ("rollout.group_size", 1): "2 or more: advantages compare the responses to a prompt",
    ("rollout.top_k", 1): "2 or more, or null: with 1, all responses to a prompt are the same",
    ("rollout.workers", 0): "1 or more: episodes run in rollout workers",
    ("trainer.precision", "bf16"): "trainer.dtype=bfloat16",
    ("trainer.precision", "fp32"): "trainer.dtype=float32",
    ("sync.method", "store"): "disk, which writes versions to sync.directory, reshard or broadcast",
    **{(f"verify.anomalies.{rule}.action", "off"): f"verify.anomalies.{rule}.above=null" for rule in ("grad_norm", "kl_engine")},
}
"""(Key, one of its values that was removed) -> what to do instead."""


def take(values: dict[str, Any]) -> dict[tuple[str, ...], tuple[Any, str]]:
    """Delete removed keys and values from the values of a configuration.

    Returns:
        The path of every one that is not idle -> the value, and what to do instead.
    """
    found: dict[tuple[str, ...], tuple[Any, str]] = {}
    for key in dict.fromkeys((*KEYS, *(key for key, _ in VALUES))):
        *sections, name = key.split(".")
        inner: Any = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or name not in inner:
            continue
        value, gone = inner[name], KEYS.get(key)
        if gone is None:
            instead = next((instead for (of, one), instead in VALUES.items() if of == key and _same(value, one)), None)
            if instead is None:
                continue
            found[*sections, name] = value, instead
        elif gone.idle is not None and not any(_same(value, one) for one in gone.idle):
            found[*sections, name] = value, gone.instead
        del inner[name]
    return found


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)
