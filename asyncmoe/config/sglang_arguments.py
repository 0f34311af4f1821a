"""Arguments (`engines.args`) and environment variables of SGLang's server that users may set: those that change nothing asyncmoe relies on
(recorded log-probabilities, routes and masks, versions, and the memory that weights are written into). All others are refused, so that an
argument of another SGLang version is reviewed before a run trains with it.

Source: the fields of sglang 0.5.23's ServerArgs (srt/arg_groups/fields) and srt/environ.py. A test compares this list with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from asyncmoe.errors import UserError
from asyncmoe.plugins import nearest

_OWNED = """
--attention-data-parallel-size=engines.dp_attention --attn-dp-size=engines.dp_attention
--data-parallel-size=engines.dp_attention --dp-size=engines.dp_attention
--enable-dp-attention=engines.dp_attention
--base-gpu-id=engines.first_gpu --dtype=engines.dtype --ep=engines.ep --ep-size=engines.ep --expert-parallel-size=engines.ep
--host=cluster.network --max-running-requests=engines.max_running --model=model.path --model-path=model.path --nnodes=engines.nodes
--port=engines.port --random-seed=run.seed --tensor-parallel-size=engines.tp --tp=engines.tp --tp-size=engines.tp
--trust-remote-code=model.trust_remote_code
"""
OWNED = dict(one.split("=") for one in _OWNED.split())
"""Arguments that follow from the configuration -> the key that sets them."""
_SUPPORTED = """
--attention-backend --chunked-prefill-size --context-length --cuda-graph-backend-decode --cuda-graph-backend-prefill --cuda-graph-bs-decode
--cuda-graph-bs-prefill --cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --decode-attention-backend --decode-log-interval
--disable-chunked-prefix-cache --disable-cuda-graph --disable-decode-cuda-graph --disable-overlap-schedule --disable-prefill-cuda-graph
--disable-radix-cache --enable-fp32-lm-head --enable-layerwise-nvtx-marker --enable-metrics --enable-mixed-chunk --fp8-gemm-backend
--kv-cache-dtype --log-level --log-level-http --log-requests --log-requests-level --lora-backend --max-lora-rank --max-prefill-tokens
--max-total-tokens --mem-fraction-static --moe-runner-backend --page-size --prefill-attention-backend --quantization
--radix-eviction-policy --sampling-backend --schedule-conservativeness --schedule-policy --skip-server-warmup --sleep-on-idle
--disable-custom-all-reduce --watchdog-timeout
"""
SUPPORTED = frozenset(_SUPPORTED.split())
_VARIABLES = """
SGLANG_CACHE_DIR SGLANG_CPU_OMP_ SGLANG_CUDA_COREDUMP SGLANG_ENABLE_JIT_ SGLANG_JIT_ SGLANG_LOG_ SGLANG_PROFILE_ SGLANG_PYSPY_
SGLANG_TIMEOUT_KEEP_ALIVE SGLANG_TORCH_PROFILER_DIR SGLANG_USE_CPU_ENGINE
"""
"""Prefixes of the names of supported environment variables."""


def refusal(words: Iterable[str]) -> str:
    """Return why arguments are refused; empty if they are supported. A name must be complete, although SGLang also accepts a prefix of
    it."""
    for word in words:
        flag = word.partition("=")[0]
        if not flag.startswith("-") or re.match(r"-\.?\d", flag) or flag in SUPPORTED:
            continue
        if key := OWNED.get(flag):
            return f"engines.args: got {flag}, expected none of the arguments asyncmoe gives an engine; set {key}"
        full = next((one for one in sorted(SUPPORTED) if one.startswith(flag)), None) or nearest(flag, SUPPORTED)
        way = f"write {full} if you mean that, else leave it out" if full else "leave it out"
        known = "a supported argument of SGLang (asyncmoe/config/sglang_arguments.py lists them)"
        return f"engines.args: got {flag}, expected {known}; {way}"
    return ""


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """Return the names of an environment's SGLang variables that are not supported."""
    return sorted(one for one in environ if one.startswith("SGLANG_") and not one.startswith(tuple(_VARIABLES.split())))


def value(words: Sequence[str], name: str) -> str | None:
    """Return an argument's last value, given after a space or a "="; None if the argument is missing."""
    found = None
    for at, word in enumerate(words):
        flag, equals, given = word.partition("=")
        if flag == name:
            found = given if equals else "".join(words[at + 1 : at + 2])
    return found


def number(words: Sequence[str], name: str) -> int | None:
    """Return `value` as a number.

    Raises:
        UserError: it is not a number.
    """
    found = value(words, name)
    if found is not None and not found.isdecimal():
        raise UserError(f"engines.args: {name}", got=repr(found), expected="a number")
    return None if found is None else int(found)
