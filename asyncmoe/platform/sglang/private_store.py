"""Stores in which the workers of a server meet, in files that no other user can reach, in place of ports that ask for no key."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from asyncmoe.platform.sglang.patching import after_import
from asyncmoe.scratch import VARIABLE

_ADDRESS, _INTERFACE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "GLOO_SOCKET_IFNAME"


def install() -> None:
    """Let workers join a weight group in a file: its path, then as if of a host, `:0` for the port. Call it before the import of SGLang."""
    after_import("sglang.srt.model_executor.model_runner_components.weight_updater", _mend)


def prepare(arguments: Sequence[str]) -> None:
    """Set, in the server's main process, where its workers meet and on which interface their process groups listen.

    Args:
        arguments: the server's. It listens on loopback in a run on one machine, and then its workers do.
    """
    # The folder is new and private only if a run has made it.
    if os.environ.get(VARIABLE) and "--dist-init-addr" not in arguments:
        os.environ.setdefault(_ADDRESS, f"file://{tempfile.gettempdir()}/workers")
    if "127.0.0.1" in arguments:
        os.environ.setdefault(_INTERFACE, "lo")


def _mend(module: Any) -> None:
    join = module.init_custom_process_group

    def join_in_file(*, init_method: str, **named: Any) -> Any:
        if init_method.startswith("tcp:///"):
            init_method = f"file://{init_method.removeprefix('tcp://').removesuffix(':0')}"
        return join(init_method=init_method, **named)

    module.init_custom_process_group = join_in_file
