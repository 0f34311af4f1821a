"""A real engine gives its memory to the machine and takes it again. What nobody has written since is named; an update writes all of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.engines.sglang.connection import Acknowledged
from asyncmoe.engines.sglang.lora import flags
from asyncmoe.engines.sglang.process import SGLangProcess
from asyncmoe.engines.types import ABORTED, Generation, Memory, Sampling
from asyncmoe.errors import EngineError
from asyncmoe.models import EngineParallel, engine_dtype, load_hf_config, qwen3_moe
from asyncmoe.models.lora.adapter import Kind
from asyncmoe.models.make import make_model
from asyncmoe.models.payload import Payload
from asyncmoe.reshard import RankLayout
from tests import families, float8
from tests.engine import test_adapters
from tests.engine.conftest import PROMPT, Rig, family, running, settings
from tests.engine.test_direct import Stage
from tests.unit.adapters import ALL, random_adapter

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
BOTH: tuple[Memory, ...] = ("weights", "kv_cache")
LARGE = MadeModel(layers=4, hidden=512, experts=16, expert_hidden=512, heads=8, kv_heads=4, head_dim=64)
TOKENS, CACHED = 24576, 2 * LARGE.layers * LARGE.kv_heads * LARGE.head_dim * 4
"""Of its cache, and the bytes of each: 215 and 201 MB."""
DERIVED = {"deepseek": ("w_kc", "w_vc")}
DERIVED["float8"] = DERIVED["deepseek"]
"""What an update writes though it is not sent, in every layer's attention."""


@contextmanager
def engine(path: Path, folder: Path, runner: asyncio.Runner, memory: Sequence[str] = (), **engines: Any) -> Iterator[Rig]:
    config = settings(path, folder / "run", **{"dtype": "auto", "max_total_tokens": 4096} | engines)
    with running(config, runner, start=lambda: [SGLangProcess("e", config, 0, memory=("--enable-memory-saver", *memory))]) as rig:
        yield rig


def write(kind: str, folder: Path) -> Path:
    if kind == "float8":
        float8.write(float8.plain_model(folder / "plain", "deepseek_v3"), folder / kind)
        return folder / kind
    return families.write(folder / kind, kind)


def layouts(rig: Rig) -> tuple[RankLayout, ...]:
    hf, sizes = load_hf_config(rig.config.model.path), rig.config.engines
    return Payload(hf).engines(EngineParallel(sizes.tp, sizes.ep, sizes.dp_attention), engine_dtype(hf, sizes))


def charged(rig: Rig) -> int:
    """Bytes of anonymous and shared memory of the server's processes, in which a page of several processes counts once."""
    found = 0
    for process in family(rig.engine):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            found += sum(int(kib) << 10 for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", rollup, re.MULTILINE))
    return found


async def generate(rig: Rig, tokens: int = 24, adapter: str | None = None) -> Generation:
    """The likeliest continuation, nothing of which comes from a cache."""
    sampling = Sampling(1.0, tokens, (), top_k=1)
    return await rig.engine.client.generate(PROMPT, sampling, str(time.monotonic_ns()), 60.0, adapter=adapter)


def same(one: Generation, other: Generation) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)


def abort_and_release(rig: Rig) -> None:
    """Interrupt a response, as `abort_resume` does, and release everything."""

    async def both() -> None:
        asked = asyncio.create_task(generate(rig, 400))
        await asyncio.sleep(0.3)
        await rig.engine.client._post("/pause_generation", {"mode": "abort"}, Acknowledged)
        assert (await asked).finish == ABORTED
        await rig.engine.client.release_memory(BOTH, 60.0)

    rig.run(both())


@pytest.mark.parametrize(("kind", "tp"), [("qwen3_moe", 1), ("deepseek", 2), ("float8", 1)])
def test_after_an_update_an_engine_that_slept_says_what_it_said_before(kind: str, tp: int, runner: asyncio.Runner, tmp_path: Path) -> None:
    path = write(kind, tmp_path)
    with engine(path, tmp_path, runner, tp=tp) as rig:
        client, stage = rig.engine.client, Stage(rig, [], tmp_path, ())
        for version in (1, 2, 3):
            found = rig.run(stage.publish(1, {"tp=1": [(SimpleNamespace(path=path), version)]}, in_place=True))  # type: ignore[list-item]
            assert [outcome["error"] for outcome in found.outcomes[0]] == [None]
            if version > 1:
                rig.run(client.resume_memory(("kv_cache",), 60.0))
                assert rig.run(client.poisoned(60.0)) == ({},) * tp
            said = rig.run(generate(rig))
            before = said if version == 1 else before  # noqa: F821
            assert same(said, before)
            abort_and_release(rig)
            rig.run(client.resume_memory(("weights",), 60.0))
            layers = range(load_hf_config(path)["num_hidden_layers"])
            derived = {f"model.layers.{layer}.self_attn.{name}" for layer in layers for name in DERIVED.get(kind, ())}
            for rank, layout in zip(rig.run(client.poisoned(60.0)), layouts(rig), strict=True):
                assert rank.keys() == layout.storages.keys() | derived
                assert all(count == whole for count, _, whole in map(str.split, rank.values()))


def test_released_memory_is_free_and_no_cycle_keeps_any(runner: asyncio.Runner, tmp_path: Path) -> None:
    make_model(tmp_path / "large", LARGE, seed=0)
    with engine(tmp_path / "large", tmp_path, runner, max_total_tokens=TOKENS) as rig:
        client, taken = rig.engine.client, []
        rig.run(generate(rig))
        wanted = TOKENS * CACHED + sum(storage.nbytes for storage in layouts(rig)[0].storages.values())
        for _ in range(50):
            before = charged(rig)
            rig.run(client.release_memory(BOTH, 60.0))
            assert 0.95 * wanted < before - charged(rig) < 1.05 * wanted
            rig.run(client.resume_memory(BOTH, 60.0))
            taken.append(charged(rig))
        print(f"{wanted} bytes; after cycles {taken[::7]}")
        assert max(taken[5:]) - min(taken[5:]) < wanted / 100


def test_with_adapters_the_weights_come_back_from_their_backup(model: Path, runner: asyncio.Runner, tmp_path: Path) -> None:
    """No update of adapters would write the weights; the adapters' memory is not released."""
    kind = Kind(ALL, 4, 8.0, "per_expert")
    with engine(model, tmp_path, runner, ("--enable-weights-cpu-backup", *flags(kind, 4))) as rig:
        adapted = test_adapters.Rig(rig.engine, "per_expert", qwen3_moe.FAMILY.shape_of(load_hf_config(model)), rig.run)
        files = adapted.write(tmp_path / "adapter", random_adapter(adapted.m, kind, 1))
        rig.run(rig.engine.client.load_adapter("policy", files, 60.0))
        before = [rig.run(generate(rig, adapter=adapter)) for adapter in ("policy", None)]
        assert not same(*before)
        for _ in range(2):
            abort_and_release(rig)
            rig.run(rig.engine.client.resume_memory(BOTH, 60.0))
            rig.run(rig.engine.client.resume())
            assert rig.run(rig.engine.client.poisoned(60.0)) == ({},)
            assert all(map(same, before, (rig.run(generate(rig, adapter=adapter)) for adapter in ("policy", None))))


@pytest.mark.parametrize("paused", [False, True])
def test_an_engine_with_a_request_refuses_and_lives(model: Path, runner: asyncio.Runner, tmp_path: Path, paused: bool) -> None:
    with engine(model, tmp_path, runner) as rig:
        client = rig.engine.client

        async def refused() -> Generation:
            asked = asyncio.create_task(generate(rig, 1500))
            await asyncio.sleep(0.5)
            if paused:
                await client.pause()
            with pytest.raises(EngineError, match="Timed out waiting for idle state"):
                await client.release_memory(BOTH, 60.0)
            if paused:
                await client.resume()
            return await asked

        assert len(rig.run(refused()).tokens) == 1500
