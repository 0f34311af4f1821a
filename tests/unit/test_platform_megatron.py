"""The patches that let Megatron run without CUDA: loud when their target has gone, absent where a GPU is."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from asyncmoe.errors import ConfigError
from asyncmoe.platform.megatron import patch


def test_a_missing_target_is_an_error_that_names_it() -> None:
    owner = SimpleNamespace(__name__="megatron.core.somewhere")
    with pytest.raises(ConfigError, match=r"without megatron\.core\.somewhere\.something.*install a supported version"):
        patch.replace(owner, "something", 1)
    with pytest.raises(ConfigError):
        patch.wrap(owner, "something", lambda original: original)
    assert not hasattr(owner, "something")


def test_nothing_is_patched_where_gpu_and_transformer_engine_are() -> None:
    run(
        "import importlib.machinery, sys, types\n"
        "engine = sys.modules['transformer_engine'] = types.ModuleType('transformer_engine')\n"
        "engine.__spec__ = importlib.machinery.ModuleSpec('transformer_engine', None)\n"
        "import torch; torch.cuda.is_available = lambda: True; before = [torch.zeros, torch.cuda.Stream, torch.Tensor.cuda]\n"
        "from asyncmoe.platform import megatron; megatron.prepare()\n"
        "assert before == [torch.zeros, torch.cuda.Stream, torch.Tensor.cuda]; assert 'megatron.core' not in sys.modules\n"
        "print('untouched')",
        "untouched",
    )


def run(script: str, *wanted: str) -> None:
    """Run a script in a fresh Python: what it prints has all of `wanted`."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    for text in wanted:
        assert text in done.stdout + done.stderr, done.stdout + done.stderr
