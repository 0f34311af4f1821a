"""The real SGLang server where its kernel wheels are missing: `python -m tests.gpu.bundle.bare_server <arguments of the server>`.

What carries it on a CPU (`asyncmoe.platform.sglang.cpu`) carries it here. On a card experts and attention are SGLang's Triton kernels, with
CUDA graphs, and all else torch's operators; all tensors are on the card, so weights, staging memory and updates are as on any GPU.
Multiprocessing executes this module again in every child, by its name.
"""

from __future__ import annotations

import sys

import torch

from tests.gpu.bundle import without_kernels

CARD = torch.cuda.is_available()
ON_CARD = (
    *("--device", "cuda", "--mem-fraction-static", "0.3"),
    # SGLang takes no graphs with torch's attention (arg_groups/attention_hook.py). Few sizes: every one is captured before the start.
    *("--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "4", "16"),
)
"""After the defaults that a CPU needs."""
without_kernels.prepare(triton=CARD)

from asyncmoe.platform.sglang import cpu, cpu_memory, server  # noqa: E402

if CARD:
    cpu_memory.PATCHES.clear()  # torch_memory_saver releases a card's memory
    cpu.install()

if __name__ == "__main__":
    on_card = [*(word for word in cpu.ARGUMENTS if word != "--disable-cuda-graph"), *ON_CARD] if CARD else []
    server.main([*on_card, *sys.argv[1:]])
