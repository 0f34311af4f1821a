"""What a real engine reports about routes and masks, parsed and packed, is what transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncmoe.record import Routing, decode_masks, decode_routes, encode_masks, encode_routes
from asyncmoe.rollout.engine import Engine
from asyncmoe.rollout.sampled import routed_experts, sampling_masks
from tests.engine.conftest import settings

pytestmark = pytest.mark.engine

ROUTING = Routing(all_layers=4, layers=(0, 1, 2, 3), top_k=2, experts=8)
PROMPT = [20, 30, 40, 50, 60]
# A random model is nearly uniform: with this top-p either of the two cuts some supports.
TEMPERATURE, TOP_K, TOP_P = 0.7, 50, 0.3


@pytest.fixture(scope="module")
def url(model: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an engine that reports routes."""

    async def start() -> Engine:
        config = settings(model, tmp_path_factory.mktemp("run"), args=["--enable-return-routed-experts"])
        engine = Engine("engine.0", config, 0, config.run.dir)
        try:
            await engine.wait_ready()
        except BaseException:
            await engine.stop()
            raise
        return engine

    engine = runner.run(start())
    yield engine.client.url
    runner.run(engine.stop())


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def generate(runner: asyncio.Runner, url: str, tokens: list[int], new: int, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    sampling = {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True, **fields}

    async def ask() -> dict[str, Any]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session, session.post(f"{url}/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()
            answer: dict[str, Any] = await reply.json()
            return answer

    answer = runner.run(ask())
    return answer["output_ids"], answer["meta_info"]


def test_routes_of_two_turns_are_those_of_transformers(runner: asyncio.Runner, url: str, reference: Any) -> None:
    response, meta = generate(runner, url, PROMPT, 20)
    tokens = PROMPT + response
    first = routed_experts(meta["routed_experts"], ROUTING, tokens=len(tokens), held=0, key="g0")
    tokens += [7, 8, 9]  # an observation
    response, meta = generate(runner, url, tokens, 10, routed_experts_start_len=len(first))
    tokens += response
    second = routed_experts(meta["routed_experts"], ROUTING, tokens=len(tokens), held=len(first), key="g0")
    packed = encode_routes(np.concatenate([first, second]), ROUTING, "g0")
    got = decode_routes(packed, "g0")

    chosen: list[np.ndarray] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda gate, inputs, _: chosen.append((inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T).topk(2).indices.numpy())
        )
        for layer in reference.model.layers
    ]
    with torch.no_grad():
        reference(torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    np.testing.assert_array_equal(got, np.stack(chosen))


def test_masks_are_those_of_transformers(runner: asyncio.Runner, url: str, reference: Any) -> None:
    response, meta = generate(runner, url, PROMPT, 20, return_sampling_mask=True)
    vocabulary = reference.config.vocab_size
    lists = meta["output_token_sampling_mask"]
    found = sampling_masks(lists, np.array(response, np.int32), vocabulary, before=len(PROMPT), after=0, key="g0")
    masks = decode_masks(encode_masks(found, "g0"), "g0")
    assert masks.counts[: len(PROMPT)].tolist() == [0] * len(PROMPT)

    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT + response])).logits[0, len(PROMPT) - 1 : -1]
    most, ids = (logits / TEMPERATURE).softmax(-1).topk(TOP_K)
    # `top_k_top_p_min_p_sampling_from_probs_torch`: top-p counts shares of the whole vocabulary, not of the top-k.
    kept = most.cumsum(-1) - most <= TOP_P
    assert masks.counts.max() <= TOP_K
    assert kept.sum(-1).min() < TOP_K
    for row, (mine, keep) in enumerate(zip(ids, kept, strict=True), start=len(PROMPT)):
        expected = sorted(mine[keep].tolist())
        assert masks.ids[masks.offsets[row] : masks.offsets[row + 1]].tolist() == expected
