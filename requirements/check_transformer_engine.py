"""Imports Transformer Engine, after torch, which loads the NCCL and cuBLAS that Transformer Engine is linked to."""

import importlib
import importlib.metadata

importlib.import_module("torch")
importlib.import_module("transformer_engine.pytorch")
print("Transformer Engine", importlib.metadata.version("transformer-engine"))
