"""The real SGLang server where its kernel wheels are missing: `python -m tests.gpu.bundle.bare_server <arguments of the server>`.

What carries it on a CPU (`asyncmoe.platform.sglang.cpu`) carries it here: every layer computes with torch's own operators, attention
too. With a card all tensors are on it, so weights, staging memory and updates are as on any GPU; SGLang's kernels and graphs are not tried.
Multiprocessing executes this module again in every child, by its name.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from asyncmoe.platform.sglang.lifetime import end_with_parent, key_arguments

end_with_parent()

import torch  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

from asyncmoe.platform.sglang import cpu  # noqa: E402
from asyncmoe.platform.sglang.patching import after_import  # noqa: E402
from asyncmoe.platform.sglang.standin import provide, refuse  # noqa: E402

CARD = torch.cuda.is_available()
ON_CARD = ("--device", "cuda", "--mem-fraction-static", "0.3")


def _without_kernels(module: ModuleType) -> None:
    """sglang.srt.utils.common.is_cuda decides in every layer whether kernels are called."""
    vars(module)["is_cuda"] = vars(module)["is_cuda_alike"] = lambda: False


import_utils.is_torchvision_available()  # transformers remembers the answer, and looks for no more than torchvision has
provide("torchvision", refuse, {"torchvision.__version__": "0"})
if CARD:
    after_import("sglang.srt.utils.common", _without_kernels)
cpu.install()


def main() -> None:
    """Serve until told to stop."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if not CARD:
        cpu.fork_children()
    load_plugins()
    try:
        arguments = [*cpu.ARGUMENTS, *(ON_CARD if CARD else ()), *sys.argv[1:], *key_arguments(os.environ)]
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
