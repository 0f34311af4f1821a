"""Run `asyncmoe.platform.sglang.server` as the main module.

The server spawns its scheduler and detokenizer with multiprocessing, which executes the main module again in each child, but
never one that is called `__main__` (`multiprocessing.spawn._fixup_main_from_name`): the patches would be missing there. Under
`server`'s own name they are not.
"""

import runpy

runpy.run_module("asyncmoe.platform.sglang.server", run_name="__main__", alter_sys=True)
