"""Lending an engine's memory: a real SGLang server gives its memory back and takes it again: `python -m tests.gpu.bundle.saver RESULT`.

On a card the server runs with --enable-memory-saver: it releases KV cache, weights and captured graphs, one after the other, and resumes.
Released weights are lost, so all of them are then loaded in place, and the server must say again what it said before. Bytes are the
driver's (cudaMemGetInfo). Without a card the CPU's memory is released, which tests/engine/test_memory.py measures.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import torch

from asyncmoe.config import Config, parse
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import Memory, Sampling
from asyncmoe.models import engine_parallel, load_hf_config
from asyncmoe.models.make import make_model
from asyncmoe.plan import budget, memory
from tests.gpu.bundle import tiny_run
from tests.gpu.bundle.summary import write_outcome

CARD = torch.cuda.is_available()
TAGS: tuple[Memory, ...] = ("kv_cache", "weights", "cuda_graph")
PROMPT, TOKENS = tuple(range(30, 60)), 48
GIVEN_BACK = 0.95
"""Share of the planned bytes of weights and KV cache that must become free."""
_WAIT_S = 60.0
Figures = dict[str, tuple[Any, str]]


def main() -> None:
    figures: Figures = {"tokens": (TOKENS, "tokens, compared")}
    with tempfile.TemporaryDirectory() as folder:
        config, others = parse(configuration(Path(folder))), Path(folder, "others")
        assert config.model.make is not None
        for seed, path in enumerate((config.model.path, others)):
            make_model(path, config.model.make, seed)
        if CARD:
            let_preload()
        try:
            asyncio.run(measured(config, others, figures))
        finally:
            write_outcome(Path(sys.argv[1]), figures)
    if not CARD:
        write_outcome(Path(sys.argv[1]), figures, "no GPU here: a CPU's memory was released")


def configuration(folder: Path) -> dict[str, Any]:
    """The tiny run's, with a model and a KV cache large enough to be seen on a card."""
    given = tiny_run.configuration(folder, CARD)
    if CARD:
        given["model"]["make"] |= {"layers": 8, "hidden": 1024, "experts": 16, "expert_hidden": 512}
        given["engines"]["max_total_tokens"] = 1 << 20
    return given


def let_preload() -> None:
    """Let the server's processes, which load the saver's library before torch, find what it needs where torch found it: libcuda and
    libcudart."""
    torch.cuda.init()
    folders = {str(Path(word).parent) for word in Path("/proc/self/maps").read_text().split() if re.search(r"/libcuda(rt)?\.so", word)}
    os.environ["LD_LIBRARY_PATH"] = ":".join([*sorted(folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


async def measured(config: Config, others: Path, figures: Figures) -> None:
    """Run the sequence; put what is found into `figures`.

    Args:
        others: a checkpoint of other weights.
    """
    engine = SGLangProcess("engine.0", config, 0, memory=("--enable-memory-saver",))
    try:
        await timed(figures, "start", engine.wait_ready())
        own = await said(engine)
        await timed(figures, "other", update(engine, others))
        if await said(engine) == own:
            sys.exit(f"other weights: got the same {TOKENS} tokens, expected others; an update in place does nothing")
        for tag in TAGS:
            await timed(figures, f"release_{tag}", engine.client.release_memory((tag,), _WAIT_S))
        for tag in reversed(TAGS):
            await timed(figures, f"resume_{tag}", engine.client.resume_memory((tag,), _WAIT_S))
            if tag == "weights":
                await timed(figures, "update", update(engine, config.model.path))
        if (again := await said(engine)) != own:
            sys.exit(f"after release, resume and update: got the tokens {again}, expected {own}, as before")
    finally:
        await engine.stop()
        print((config.run.dir / "logs" / "engine-0.log").read_text(errors="replace")[-20_000:], flush=True)
    if CARD:
        hf = load_hf_config(config.model.path)
        planned = memory.engine(hf, engine_parallel(config), budget.serving(config, hf)).parts
        wanted = planned["weights"] + planned["KV cache"]
        share = (figures["release_cuda_graph_free"][0] - figures["other_free"][0]) / wanted
        figures["given_back"] = (share, "of weights and KV cache by asyncmoe plan")
        if share < GIVEN_BACK:
            sys.exit(f"memory: got {share:.1%} of {wanted} bytes back, expected at least {GIVEN_BACK:.0%}")


async def timed(figures: Figures, name: str, work: Awaitable[None]) -> None:
    begin = time.monotonic()
    await work
    figures[name] = (time.monotonic() - begin, "s")
    if CARD:
        figures[f"{name}_free"] = (torch.cuda.mem_get_info(0)[0], "bytes")


async def update(engine: SGLangProcess, checkpoint: Path) -> None:
    """Load all weights in place, as `sync.method: disk` does."""
    await engine.client.pause()
    await engine.client.load_files(str(checkpoint), _WAIT_S)
    await engine.client.resume()


async def said(engine: SGLangProcess) -> list[int]:
    """The likeliest continuation, nothing of which comes from a cache."""
    sampling = Sampling(1.0, TOKENS, (), top_k=1)
    answer = await engine.client.generate(PROMPT, sampling, str(time.monotonic_ns()), _WAIT_S)
    return [int(token) for token in answer.tokens]


if __name__ == "__main__":
    main()
