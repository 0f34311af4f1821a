"""Stand-ins for CUDA packages in an engine on CPU, and detection of another SGLang."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from asyncmoe.platform.sglang import cpu, cpu_experts, lifetime, patching


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if not name.startswith("torch."):  # which registers its operators once in a process
            del sys.modules[name]


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "version", lambda name: "0.6.0")
    with pytest.raises(cpu.PatchTargetGone, match=r"sglang: got 0\.6\.0, expected 0\.5\.23"):
        cpu.install()
    for near in ("0.5.23", "0.5.23.post1", "0.5.23+cpu"):
        monkeypatch.setattr(cpu, "version", lambda name, found=near: found)
        cpu._check_version()


def test_a_module_is_patched_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patched_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    patching.after_import("patched_later", lambda module: seen.append(module.value) or setattr(module, "value", 2))
    assert not seen
    assert importlib.import_module("patched_later").value == 2
    assert seen == [1]
    with pytest.raises(cpu.PatchTargetGone, match="patched_later was imported before it could be patched"):
        patching.after_import("patched_later", lambda module: None)


def test_an_expert_of_another_rank_adds_nothing() -> None:
    module = ModuleType("native")
    outputs = torch.tensor([1.0, 10.0, 100.0])

    def native(_layer: object, x: torch.Tensor, topk_output: TopK, _config: object) -> torch.Tensor:
        assert (topk_output.topk_ids >= 0).all()
        assert len(x)
        return x * (outputs[topk_output.topk_ids] * topk_output.topk_weights).sum(1, keepdim=True)

    vars(module)["moe_forward_native"] = native
    cpu_experts.native(module)
    x, weights = torch.tensor([[1.0], [2.0], [1.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    for ids, wanted in (
        ([[0, 2], [2, 1], [1, 0]], [201, 680, 56]),
        ([[0, 2], [-1, 1], [-1, -1]], [201, 80, 0]),
        ([[-1, -1], [-1, -1], [-1, -1]], [0, 0, 0]),
    ):
        assert module.moe_forward_native(None, x, TopK(weights, torch.tensor(ids)), None).flatten().tolist() == wanted


class TopK(NamedTuple):
    """As `StandardTopKOutput` of SGLang."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def test_a_key_that_begins_with_a_dash_is_a_key() -> None:
    """SGLang parses its command line with argparse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    assert parser.parse_args(lifetime.key_arguments({lifetime.API_KEY: "-dCY3"})).api_key == "-dCY3"
    assert lifetime.key_arguments({}) == []
