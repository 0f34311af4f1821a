"""The main module of a server and of every process that it spawns, in which multiprocessing executes it again."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncmoe.imports import uncollected
from asyncmoe.platform.sglang.lifetime import end_with_parent, key_arguments

end_with_parent()  # before the imports: they take seconds, during which the parent may end

with uncollected():
    import msgspec
    import torch

    from asyncmoe.platform import file_store, tcp_store
    from asyncmoe.platform.sglang import access, cache_scales, commands, overlap, packed_answers, packed_routes, patching, private_meeting
    from asyncmoe.rpc import peers

_CUDA = torch.cuda.is_available()
file_store.install()
patching.install(access, cache_scales, commands, overlap, packed_answers)
packed_routes.install()
private_meeting.install()
tcp_store.install()
if not _CUDA:
    from asyncmoe.platform.sglang import cpu

    with uncollected():  # it imports parts of SGLang
        cpu.install()


def main(arguments: Sequence[str]) -> None:
    """Serve until stopped, as `sglang.launch_server` does as the main module.

    Raises:
        UserError: the program named by `engines.python` has changed NCCL settings that this process's starter shares with the trainer.
    """
    if (starter := os.environ.get(peers.STARTER)) is not None:
        peers.check(msgspec.json.decode(starter, type=peers.Facts), peers.facts("its server", ()), float("inf"))
    with uncollected():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        if not _CUDA:
            cpu.fork_children()
    if _CUDA and "--enable-memory-saver" in arguments:
        _let_preload()
    load_plugins()
    private_meeting.prepare(arguments)
    words = [*([] if _CUDA else cpu.ARGUMENTS), *arguments, *key_arguments(os.environ)]
    try:
        run_server(prepare_server_args(overlap.checked(words)))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _let_preload() -> None:
    """Let children, which load torch_memory_saver's library before torch, find what it needs where torch found it."""
    files = (Path(word) for word in Path("/proc/self/maps").read_text().split() if word.startswith("/"))
    folders = {str(file.parent) for file in files if file.name.startswith(("libcuda.so", "libcudart.so"))}
    os.environ["LD_LIBRARY_PATH"] = ":".join([*sorted(folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


if __name__ == "__main__":
    main(sys.argv[1:])
