"""A real engine gives its memory to the machine and takes it again. What nobody has written since is named; an update writes all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.engines.sglang.lora import flags
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import ABORTED, MemoryTag, Sampling
from asyncmoe.errors import EngineError
from asyncmoe.models import EngineParallel, load_hf_config, qwen3_moe
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.make import make_model
from asyncmoe.models.payload import Payload
from asyncmoe.rpc.messages import Reply, WeightsCommit
from tests import families, float8
from tests.engine import test_adapters
from tests.engine.conftest import PROMPT, Rig, family, running, settings
from tests.engine.test_direct import Stage
from tests.unit.adapters import ALL, random_adapter

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")
LARGE = MadeModel(layers=4, hidden=512, experts=16, expert_hidden=512, heads=8, kv_heads=4, head_dim=64)
TOKENS, CACHED = 24576, 2 * LARGE.layers * LARGE.kv_heads * LARGE.head_dim * 4
"""Of its cache, and the bytes of each: 215 and 201 MB."""


@contextmanager
def engine(path: Path, folder: Path, runner: asyncio.Runner, memory: Sequence[str] = (), **engines: Any) -> Iterator[Rig]:
    config = settings(path, folder / "run", **{"dtype": "auto", "max_total_tokens": 4096} | engines)
    with running(config, runner, start=lambda: [SGLangProcess("e", config, 0, memory=("--enable-memory-saver", *memory))]) as rig:
        yield rig


def owned(rig: Rig) -> int:
    """Bytes of memory that belongs to one of the server's processes alone."""
    return sum(process.memory_full_info().uss for process in family(rig.engine))


async def generate(rig: Rig, tokens: int = 24, adapter: str | None = None) -> tuple[list[int], list[float], str]:
    """The likeliest continuation, nothing of which comes from a cache: tokens, log-probabilities, and how it ended."""
    sampling = Sampling(1.0, tokens, (), top_k=1)
    answer = await rig.engine.client.generate(PROMPT, sampling, str(time.monotonic_ns()), 60.0, adapter=adapter)
    return answer.tokens.tolist(), answer.logprobs.tolist(), answer.finish


async def abort_and_release(rig: Rig) -> None:
    """Interrupt a response, as `abort_resume` does, and release everything."""
    asked = asyncio.create_task(generate(rig, 400))
    await asyncio.sleep(0.2)
    await rig.engine.client._send("/pause_generation", {"mode": "abort"})
    assert (await asked)[2] == ABORTED
    await rig.engine.client.release_memory(BOTH, 60.0)


@pytest.mark.parametrize(("kind", "tp"), [("qwen3_moe", 1), ("float8", 2), pytest.param("deepseek", 1, marks=pytest.mark.thorough)])
def test_after_an_update_an_engine_that_slept_says_what_it_said_before(kind: str, tp: int, runner: asyncio.Runner, tmp_path: Path) -> None:
    """The trainer waits meanwhile; its weights are the same in every version."""
    path, said, held = tmp_path / kind, [], []
    float8.write(float8.plain_model(tmp_path / "plain", "deepseek_v3"), path) if kind == "float8" else families.write(path, kind)
    with engine(path, tmp_path, runner, tp=tp) as rig:
        client, handle = rig.engine.client, rig.coordinator.handle

        async def sleeping_after_commits(request: Any) -> Reply:
            reply = await handle(request)
            if isinstance(request, WeightsCommit):
                if said:
                    await client.resume_memory(("kv_cache",), 60.0)
                held.append(await client.poisoned(60.0))
                said.append(await generate(rig))
                await abort_and_release(rig)
                await client.resume_memory(("weights",), 60.0)
                held.append(await client.poisoned(60.0))
            return reply

        rig.coordinator.handle = sleeping_after_commits  # type: ignore[method-assign]
        publications: Any = {"tp=1": [(SimpleNamespace(path=path), version) for version in (1, 2, 3)]}
        found = rig.run(Stage(rig, [], tmp_path, ()).publish(1, publications, in_place=True))
    assert [outcome["error"] for outcome in found.outcomes[0]] == [None] * 3
    assert said == said[:1] * 3
    assert held == [({},) * tp, held[1]] * 3
    for rank, layout in zip(held[1], Payload(load_hf_config(path)).engines(EngineParallel(tp), "float32"), strict=True):
        latent = [name.removesuffix("kv_b_proj.weight") for name in layout.storages if name.endswith("kv_b_proj.weight")]
        derived = {attention + half for attention in latent for half in ("w_kc", "w_vc")}
        assert rank.keys() == derived | layout.storages.keys()
        assert all(poisoned == every for poisoned, _, every in map(str.split, rank.values()))


def test_released_memory_is_free_and_no_cycle_keeps_any(runner: asyncio.Runner, tmp_path: Path) -> None:
    """An engine with a request, though paused, refuses and lives."""
    make_model(tmp_path / "large", LARGE, seed=0)
    with engine(tmp_path / "large", tmp_path, runner, max_total_tokens=TOKENS) as rig:
        client, taken = rig.engine.client, []

        async def refused() -> Any:
            asked = asyncio.create_task(generate(rig, 400))
            await asyncio.sleep(0.2)
            await client.pause()
            with pytest.raises(EngineError, match="Timed out waiting for idle state"):
                await client.release_memory(BOTH, 60.0)
            await client.resume()
            return await asked

        assert len(rig.run(refused())[0]) == 400
        wanted = TOKENS * CACHED + (tmp_path / "large" / "model.safetensors").stat().st_size
        for _ in range(50):
            before = owned(rig)
            rig.run(client.release_memory(BOTH, 60.0))
            assert 0.95 * wanted < before - owned(rig) < 1.05 * wanted
            rig.run(client.resume_memory(BOTH, 60.0))
            taken.append(owned(rig))
        assert max(taken[25:]) - max(taken[:25]) < wanted / 100  # the kernel may take clean pages back at any time


def test_with_adapters_the_weights_come_back_from_their_backup(model: Path, runner: asyncio.Runner, tmp_path: Path) -> None:
    """No update of adapters would write the weights; the adapters' memory is not released."""
    kind = Kind(ALL, 4, 8.0, "per_expert")
    with engine(model, tmp_path, runner, ("--enable-weights-cpu-backup", *flags(kind, 4))) as rig:
        adapted = test_adapters.Rig(rig.engine, "per_expert", qwen3_moe.FAMILY.shape_of(load_hf_config(model)), rig.run)
        files = adapted.write(tmp_path / "adapter", random_adapter(adapted.m, kind, 1))
        rig.run(rig.engine.client.load_adapter("policy", files, 60.0))
        before = [rig.run(generate(rig, adapter=adapter)) for adapter in ("policy", None)]
        assert before[0] != before[1]
        rig.run(abort_and_release(rig))
        rig.run(rig.engine.client.resume_memory(BOTH, 60.0))
        rig.run(rig.engine.client.resume())
        assert rig.run(rig.engine.client.poisoned(60.0)) == ({},)
        assert before == [rig.run(generate(rig, adapter=adapter)) for adapter in ("policy", None)]
