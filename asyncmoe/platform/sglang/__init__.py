"""Starting the real SGLang server: `python -m asyncmoe.platform.sglang <arguments of sglang.launch_server>`.

On a machine with a CUDA device this is SGLang as it is. On any other the patches of `cpu` come first, in the server and in
every process it spawns. Either way the server and its children end when the process that started them ends.

Only the standard library, torch and SGLang are imported here: this package runs in the engines' own Python environment.
"""
