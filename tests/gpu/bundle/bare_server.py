"""The real SGLang server where its kernel wheels are missing: `python -m tests.gpu.bundle.bare_server <arguments of the server>`.

What carries it on a CPU (`asyncmoe.platform.sglang.cpu`) carries it here. On a card experts and attention are SGLang's Triton kernels, with
CUDA graphs, and all else torch's operators; all tensors are on the card, so weights, staging memory and updates are as on any GPU.
Multiprocessing executes this module again in every child, by its name.
"""

from __future__ import annotations

import os
import sys

from asyncmoe.platform.sglang.lifetime import end_with_parent, key_arguments

end_with_parent()

import torch  # noqa: E402

from asyncmoe.platform.sglang import cpu, overlap, patching  # noqa: E402
from tests.gpu.bundle import without_kernels  # noqa: E402

CARD = torch.cuda.is_available()
ON_CARD = (
    *("--device", "cuda", "--mem-fraction-static", "0.3"),
    # SGLang takes no graphs with torch's attention (arg_groups/attention_hook.py). Few sizes: every one is captured before the start.
    *("--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "4", "16"),
)
"""After the defaults that a CPU needs."""
if "--enable-memory-saver" in sys.argv:
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # captured graphs can be released too
patching.install(overlap)
without_kernels.prepare(triton=CARD)


def main() -> None:
    """Serve until told to stop."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if not CARD:
        cpu.fork_children()
    load_plugins()
    defaults = [*(word for word in cpu.ARGUMENTS if word != "--disable-cuda-graph"), *ON_CARD] if CARD else cpu.ARGUMENTS
    words = [*defaults, *sys.argv[1:], *key_arguments(os.environ)]
    try:
        run_server(prepare_server_args(overlap.checked(words)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
