"""Starts the real SGLang server: `python -m asyncmoe.platform.sglang <arguments of sglang.launch_server>`.

Without a CUDA device the patches of `cpu` are installed in the server and in every process that it spawns. On every machine the patches of
`overlap` and `commands` are installed, and the server and its children end with the process that started them.

This package imports only the standard library, torch, SGLang and parts of asyncmoe that need nothing else, because it runs in the engines'
own Python environment.
"""
