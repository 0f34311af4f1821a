"""Imports Transformer Engine, after torch, which loads the NCCL and cuBLAS that Transformer Engine is linked to. With the argument `key` it
prints instead what a build of Transformer Engine's extension depends on."""

import importlib
import importlib.metadata
import platform
import sys

torch = importlib.import_module("torch")
if sys.argv[1:] == ["key"]:
    libc, machine = "".join(platform.libc_ver()), platform.machine()
    print(f"torch-{torch.__version__}-cuda-{torch.version.cuda}-{sys.implementation.cache_tag}-{libc}-{machine}")
    sys.exit()
importlib.import_module("transformer_engine.pytorch")
print("Transformer Engine", importlib.metadata.version("transformer-engine"))
