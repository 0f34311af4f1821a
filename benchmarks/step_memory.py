"""Memory of trainer ranks in a training step of one long micro-batch, compared with the prediction of `asyncmoe plan`, part by part.

Ranks are processes of this machine over gloo, and compute in float32. The attention scores must never exist all at once: each head would
need 4 bytes for each pair of a sequence's tokens, more than all other memory of the rank.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncmoe.errors import InvariantBroken, WaitTimeout
from benchmarks.provenance import here

DENSE: Mapping[str, Any] = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 768, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": DENSE,
    "moe": {
        **DENSE, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
}  # fmt: skip
SEQUENCES = {"one": 1, "packed": 8}
"""Sequences of a micro-batch."""
CASES = (("dense", "one"), ("dense", "packed"), ("moe", "packed"))
RANKS = (1, 2, 4)
"""Numbers of context-parallel ranks."""
WORK_S = 900.0
PARTS = ("weights", "gradients", "optimizer", "activations", "working set")
"""Parts of a trainer's memory in a step; the planner also counts weight updates, which happen between steps."""
_MB = 1e6


class StepJob(msgspec.Struct, frozen=True):
    """A rank's task.

    Attributes:
        hf: the configuration of the model, which has random weights.
        lengths: tokens of each sequence of the micro-batch.
        rank, cp: rank and number of the context-parallel ranks; there are no others.
        meeting: the ranks' rendezvous file.
        threads: number of torch's threads.
        trainer: further keys of the trainer's configuration.
    """

    hf: dict[str, Any]
    lengths: tuple[int, ...]
    rank: int
    cp: int
    meeting: str
    threads: int = 1
    trainer: dict[str, Any] = {}


class StepMemory(msgspec.Struct, frozen=True):
    """Memory of a rank in a training step, in bytes.

    Attributes:
        live: tensors at their peak, by `PARTS`; activations are those that layers keep when the last layer is done.
        planned: the same as predicted by the planner.
        resident: rise of the resident memory since before the model was built.
        largest: the largest tensor created by the step.
        seconds: duration of the step.
    """

    live: dict[str, int]
    planned: dict[str, int]
    resident: int
    largest: int
    seconds: float


def run(tokens: int = 32_768, cases: Sequence[tuple[str, str]] = CASES, ranks: Sequence[int] = RANKS) -> dict[str, Any]:
    """Run every case with every number of context-parallel ranks, one after the other.

    Returns:
        {"date", "machine", "load", "tokens", "cases"}; cases are named as in "dense_packed_cp2". Each has, in bytes, for the rank with the
        most tensor memory: "live" and "planned", "over" (their ratio), "parts" (both for each of `PARTS`); and the maximum over
        ranks of "resident", "largest" (of a tensor), "s" (seconds of the step, counting included). "scores" is the size of one head's
        scores for one sequence.

    Raises:
        WaitTimeout: a rank did not finish.
        InvariantBroken: a rank failed.
    """
    results: dict[str, Any] = {**here(), "tokens": tokens, "cases": {}}
    for model, kind in cases:
        for cp in ranks:
            results["cases"][f"{model}_{kind}_cp{cp}"] = asyncio.run(_case(model, tokens, SEQUENCES[kind], cp))
    return results


async def _case(model: str, tokens: int, sequences: int, cp: int) -> dict[str, Any]:
    lengths = (tokens // sequences,) * sequences
    threads = max(1, (os.cpu_count() or 1) // cp)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [StepJob(dict(MODELS[model]), lengths, rank, cp, f"{folder}/meeting", threads) for rank in range(cp)]
        return figures(await asyncio.gather(*map(_rank, jobs)), lengths[0])


def figures(found: Sequence[StepMemory], length: int) -> dict[str, Any]:
    """Return the figures of a case, from all its ranks. `length`: of a sequence."""
    most = max(found, key=lambda one: sum(one.live.values()))
    live, planned = sum(most.live.values()), sum(most.planned.values())
    return {
        "live": live,
        "planned": planned,
        "over": round(live / planned, 4),
        "resident": max(one.resident for one in found),
        "parts": {name.replace(" ", "_"): {"live": most.live[name], "planned": most.planned[name]} for name in PARTS},
        "largest": max(one.largest for one in found),
        "scores": 4 * length**2,
        "s": round(max(one.seconds for one in found), 1),
    }


async def _rank(job: StepJob) -> StepMemory:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    command = (sys.executable, "-m", "benchmarks.step_memory_rank", msgspec.json.encode(job).decode())
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
    try:
        out, why = await asyncio.wait_for(process.communicate(), WORK_S)
    except TimeoutError:
        raise WaitTimeout(f"rank {job.rank} of the bench", "to finish", WORK_S) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise InvariantBroken(f"bench memory: rank {job.rank} failed: {why.decode()[-2000:]}")
    return msgspec.json.decode(out.splitlines()[-1], type=StepMemory)


def table(results: Mapping[str, Any]) -> str:
    """Format one line per case, in MB; for each part, tensors and plan."""
    names = ("live", "planned", "over", "resident", *PARTS)
    lines = [f"{'':18}" + "".join(f"{name:>15}" for name in names)]
    for name, one in results["cases"].items():
        parts = (f"{part['live'] / _MB:.0f} / {part['planned'] / _MB:.0f}" for part in one["parts"].values())
        whole = (f"{one['live'] / _MB:.0f}", f"{one['planned'] / _MB:.0f}", f"{one['over']:.3f}", f"{one['resident'] / _MB:.0f}")
        lines.append(f"{name:18}" + "".join(f"{text:>15}" for text in (*whole, *parts)))
    return "\n".join(lines)
