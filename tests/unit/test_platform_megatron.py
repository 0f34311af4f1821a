"""The patches that let Megatron run without CUDA: loud when their target has gone, absent where a GPU is."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from asyncmoe.errors import ConfigError
from asyncmoe.platform.megatron import assumptions, patch


def test_a_missing_target_is_an_error_that_names_it() -> None:
    owner = SimpleNamespace(__name__="megatron.core.somewhere")
    with pytest.raises(ConfigError, match=r"without megatron\.core\.somewhere\.something.*install a supported version"):
        patch.replace(owner, "something", 1)
    with pytest.raises(ConfigError):
        patch.wrap(owner, "something", lambda original: original)
    assert not hasattr(owner, "something")


def test_a_router_that_does_without_the_missing_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class RouterGatingLinearFunction:
        @staticmethod
        def forward() -> None: ...

    monkeypatch.setattr(assumptions, "module", lambda name: SimpleNamespace(RouterGatingLinearFunction=RouterGatingLinearFunction))
    with pytest.raises(ConfigError, match="te_general_gemm"):
        assumptions.define_router_gemm()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched here")
def test_importing_megatron_first_is_refused() -> None:
    run(
        "import sys; sys.modules['megatron.core'] = sys\nfrom asyncmoe.platform import megatron; megatron.prepare()",
        "InvariantBroken",
        "imported before",
    )


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched here")
def test_cuda_means_this_processor_and_types_keep_their_names() -> None:
    run(
        "from asyncmoe.platform import megatron; megatron.prepare(); megatron.prepare()\n"
        "import torch\n"
        "assert torch.zeros(2, device='cuda').device.type == 'cpu' and torch.tensor(1.0, device='cuda:3').cuda().device.type == 'cpu'\n"
        "assert torch.zeros(2, device='meta').device.type == 'meta'\n"
        "from megatron.core.optimizer import clip_grads\n"
        "p = torch.nn.Parameter(torch.zeros(2)); p.grad = torch.tensor([3.0, 4.0])\n"
        "clip_grads.clip_grad_by_total_norm_fp32([p], 1.0, 5.0)\n"
        "assert torch.allclose(p.grad, torch.tensor([0.6, 0.8]), atol=1e-5) and p.type() == 'torch.FloatTensor'\n"
        "from asyncmoe.platform.megatron import patch\n"
        "print('right')\n"
        "patch.module('no_such_part')",
        "right",
        "ConfigError",
        "without megatron.core.no_such_part",
    )


def run(script: str, *wanted: str) -> None:
    """Run a script in a fresh Python: what it prints has all of `wanted`."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    for text in wanted:
        assert text in done.stdout + done.stderr, done.stdout + done.stderr
