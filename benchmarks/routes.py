"""Expert routes on one core: packed, next to what SGLang sends (base64 of int32 in JSON); and what recording and replaying them costs."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from asyncmoe.errors import InvariantBroken
from asyncmoe.trajectory import Routing, decode_routes, encode_routes
from benchmarks.provenance import here

ROUTING = Routing(all_layers=48, layers=tuple(range(48)), top_k=8, experts=128)
"""Qwen3-30B-A3B's."""


def everything(tokens: int = 8192) -> dict[str, Any]:
    """`run`, and what the whole costs a run.

    Returns:
        also "date", "machine", "load"; "replay": `benchmarks.replay.run`; "recording": `benchmarks.recording.run`; "answer":
        `benchmarks.recording.answer`.

    Raises: what those raise.
    """
    from benchmarks import recording, replay

    measured_at = here()
    codec, answer = run(tokens), recording.answer(drawn(tokens), ROUTING)
    return {**measured_at, **codec, "answer": answer, "replay": replay.run(), "recording": recording.run()}


def run(tokens: int = 8192, rounds: int = 15) -> dict[str, Any]:
    """Encode and decode the routes of one trajectory of so many tokens, each way in turn.

    Packed is what `Trajectory` carries: the pack and its digests; and the check of the digests, the unpack and the check of the ids.
    Peers' is JSON with base64, to int32 again.

    Returns:
        "packed" and "json": bytes_per_token; encode_GBps and decode_GBps in gigabytes of int32 for a second of processor time, medians
        of the rounds.
        "memcpy_GBps": a copy of the int32, for scale.
    """
    routes = drawn(tokens)
    packed = encode_routes(routes, ROUTING, "bench")
    text = _to_json(routes)
    _expect_same(routes, decode_routes(packed, "bench").transpose(1, 0, 2))
    _expect_same(routes, _from_json(text))
    copy = np.empty_like(routes)
    turns: dict[str, Callable[[], object]] = {
        "packed encode": lambda: encode_routes(routes, ROUTING, "bench"),
        "packed decode": lambda: decode_routes(packed, "bench"),
        "json encode": lambda: _to_json(routes),
        "json decode": lambda: _from_json(text),
        "memcpy": lambda: np.copyto(copy, routes),
    }
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            started = time.thread_time()
            turn()
            if number:
                rates[name].append(routes.nbytes / (time.thread_time() - started) / 1e9)
    found = {name: round(median(values), 3) for name, values in rates.items()}
    sizes = {"packed": memoryview(packed.planes).nbytes + 4 * len(packed.digests), "json": len(text)}
    ways = {
        way: {
            "bytes_per_token": round(size / (tokens + 1), 2),
            "encode_GBps": found[f"{way} encode"],
            "decode_GBps": found[f"{way} decode"],
        }
        for way, size in sizes.items()
    }
    return {"tokens": tokens, "layers": 48, "top_k": 8, "experts": 128, **ways, "memcpy_GBps": found["memcpy"]}


def drawn(tokens: int) -> np.ndarray:
    """int32[tokens, 48, 8]: distinct experts, a few of them far more often than others, as trained routers choose."""
    random = np.random.default_rng(0)
    liked = random.gumbel(size=(48, ROUTING.experts)).astype(np.float32)
    routes = np.empty((tokens, 48, ROUTING.top_k), np.int32)
    for layer in range(48):
        scores = liked[layer] + random.gumbel(size=(tokens, ROUTING.experts)).astype(np.float32)
        routes[:, layer] = np.argsort(-scores, axis=1)[:, : ROUTING.top_k]
    return routes


def table(results: dict[str, Any]) -> str:
    """The results of `everything` for a reader."""
    lines = [f"{'':22}{'B/token':>10}{'encode GB/s':>13}{'decode GB/s':>13}"]
    for way, name in (("packed", "bit-packed"), ("json", "base64 int32 in JSON")):
        r = results[way]
        lines.append(f"{name:22}{r['bytes_per_token']:>10.1f}{r['encode_GBps']:>13.2f}{r['decode_GBps']:>13.2f}")
    lines.append(f"GB of int32; a plain copy of it: {results['memcpy_GBps']:.2f} GB/s")
    replay, recording, answer = results["replay"], results["recording"], results["answer"]
    lines.append(f"replay adds {replay['share']:.1%} to a trainer's step of {replay['step_seconds'] * 1e3:.0f} ms")
    low, high = recording["share_quartiles"]
    lines.append(
        f"recording takes {recording['share']:.1%} off {recording['tokens_per_s']:.0f} tokens/s of an engine ({low:.1%} to {high:.1%}); "
        f"processor time {recording['processor_share']:+.1%}"
    )
    lines.append(
        f"an answer with routes, ms for 1000 tokens: pack in the engine {answer['pack']:.2f}, read {answer['read']:.2f} "
        f"({answer['read_plain']:.2f} without routes, {answer['read_unpacked']:.2f} with unpacked ones), decode {answer['decode']:.2f} "
        f"({answer['decode_unpacked']:.2f})"
    )
    return "\n".join(lines)


def _to_json(routes: np.ndarray) -> bytes:
    return json.dumps({"routed_experts": base64.b64encode(routes.tobytes()).decode()}).encode()


def _from_json(text: bytes) -> np.ndarray:
    raw = base64.b64decode(json.loads(text)["routed_experts"])
    return np.frombuffer(raw, np.int32).reshape(-1, ROUTING.all_layers, ROUTING.top_k)


def _expect_same(expected: np.ndarray, got: np.ndarray) -> None:
    if not np.array_equal(expected, got):
        raise InvariantBroken("routes came out other than they went in")
