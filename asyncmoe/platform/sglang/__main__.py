"""Runs `asyncmoe.platform.sglang.server` as the main module.

The server spawns its scheduler and detokenizer with multiprocessing, which executes the main module again in each child, except a module
named `__main__` (`multiprocessing.spawn._fixup_main_from_name`), so that the children would lack the patches. They do execute `server`,
which runs as the main module with its own name.
"""

import runpy

runpy.run_module("asyncmoe.platform.sglang.server", run_name="__main__", alter_sys=True)
