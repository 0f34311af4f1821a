"""Names of SGLang's shared memory contain the name of the engine's scratch folder (`asyncmoe.scratch`), by which its owner removes them.

SGLang's servers are killed at their end, and leave theirs behind (sglang/srt/utils/stale_shm_cleanup.py 0.5.23 says so).
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from asyncmoe.platform.sglang.patching import after_import
from asyncmoe.scratch import VARIABLE


def install() -> None:
    """Patch both places where SGLang chooses a name. Call it before the import of SGLang."""
    if os.environ.get(VARIABLE):
        after_import("sglang.srt.managers.load_snapshot", _mend_loads)
        after_import("sglang.srt.utils.stale_shm_cleanup", _mend_names)


def _mend_loads(module: Any) -> None:
    original = module.shm_path_for

    def named(ipc_name: str) -> str:
        return str(original(ipc_name)).removesuffix(".shm") + f"_{os.environ[VARIABLE]}.shm"

    module.shm_path_for = named


def _mend_names(module: Any) -> None:
    # The pid stays where SGLang's own sweep looks for it: second from the end.
    module.make_shm_name = lambda kind: f"sgl_shm_{kind}_{os.environ[VARIABLE]}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
