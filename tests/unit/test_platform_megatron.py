"""The patches that let Megatron run without CUDA: an error if their target is missing, and not installed with a GPU."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from asyncmoe.errors import ConfigError
from asyncmoe.platform import megatron
from asyncmoe.platform.megatron import patch


def test_a_missing_target_is_an_error_that_names_it() -> None:
    owner = SimpleNamespace(__name__="megatron.core.somewhere")
    with pytest.raises(ConfigError, match=r"without megatron\.core\.somewhere\.something.*install a supported version"):
        patch.replace(owner, "something", 1)
    with pytest.raises(ConfigError):
        patch.wrap(owner, "something", lambda original: original)
    assert not hasattr(owner, "something")


def test_nothing_is_patched_where_gpu_and_transformer_engine_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [torch.zeros, torch.cuda.Stream, torch.Tensor.cuda]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    megatron.prepare()
    assert before == [torch.zeros, torch.cuda.Stream, torch.Tensor.cuda]
    assert "megatron.core" not in sys.modules
