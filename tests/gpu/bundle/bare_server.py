"""The real SGLang server where its kernel wheels are missing: `python -m tests.gpu.bundle.bare_server <arguments of the server>`.

What carries it on a CPU (`asyncmoe.platform.sglang.cpu`) carries it here. `servers.MODE` in the environment says how far: every layer with
torch's own operators, attention too; or the experts, or experts and attention, as SGLang's Triton kernels, with CUDA graphs where asked.
With a card all tensors are on it, so weights, staging memory and updates are as on any GPU.
Multiprocessing executes this module again in every child, by its name.
"""

from __future__ import annotations

import os
import sys

from asyncmoe.platform.sglang.lifetime import end_with_parent, key_arguments

end_with_parent()

import torch  # noqa: E402

from asyncmoe.platform.sglang import cpu, overlap  # noqa: E402
from tests.gpu.bundle import servers, without_kernels  # noqa: E402

CARD = torch.cuda.is_available()
SERVER = servers.KNOWN[os.environ.get(servers.MODE, servers.PLAIN.name)]
overlap.install()
without_kernels.prepare(SERVER.triton)


def main() -> None:
    """Serve until told to stop."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    if not CARD:
        cpu.fork_children()
    load_plugins()
    words = [*servers.arguments(SERVER, CARD, cpu.ARGUMENTS), *sys.argv[1:], *key_arguments(os.environ)]
    try:
        run_server(prepare_server_args(overlap.checked(words)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
