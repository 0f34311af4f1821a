"""What stands in for CUDA packages in an engine on CPU, and that it notices another SGLang."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from asyncmoe.platform.sglang import cpu, cpu_experts, cpu_latent, cpu_lora, lifetime, patching
from asyncmoe.platform.sglang.standin import decorate, provide, refuse


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if not name.startswith("torch."):  # which registers its operators once in a process
            del sys.modules[name]


def test_a_kernel_package_imports_and_refuses_to_run() -> None:
    provide("absent_kernels", refuse, {"absent_kernels.scalar_type": None})
    kernels = importlib.import_module("absent_kernels")
    moe = importlib.import_module("absent_kernels.moe.fused")
    assert kernels.moe.fused is moe
    with pytest.raises(NotImplementedError, match=r"absent_kernels\.moe\.fused\.topk is a CUDA kernel"):
        moe.topk(1, 2)
    with pytest.raises(ImportError):
        importlib.import_module("absent_kernels.scalar_type")


def test_a_compiler_package_leaves_functions_as_they_are() -> None:
    provide("absent_compiler", decorate, {"absent_compiler.__version__": "3.0.0", "absent_compiler.cdiv": lambda a, b: -(a // -b)})
    compiler = importlib.import_module("absent_compiler")

    def kernel() -> int:
        return 7

    assert compiler.jit(kernel) is kernel
    assert compiler.autotune(configs=[compiler.Config({}, num_warps=4)], key=["n"])(kernel) is kernel
    assert compiler.cdiv(7, 2) == 4
    assert compiler.__version__ == "3.0.0"
    assert issubclass(type("Mine", (compiler.runtime.KernelInterface,), {}), compiler.runtime.KernelInterface)
    assert not hasattr(compiler, "__wrapped__")


def test_what_is_installed_is_not_replaced() -> None:
    provide("json", refuse, {})
    assert importlib.import_module("json").loads("[1]") == [1]


def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "version", lambda name: "0.6.0")
    with pytest.raises(cpu.PatchTargetGone, match=r"sglang: got 0\.6\.0, expected 0\.5\.23"):
        cpu.install()
    for near in ("0.5.23", "0.5.23.post1", "0.5.23+cpu"):
        monkeypatch.setattr(cpu, "version", lambda name, found=near: found)
        cpu._check_version()


def test_no_sglang_is_said() -> None:
    with pytest.raises(cpu.PatchTargetGone, match="no installed package"):
        cpu.install()


def test_a_patch_whose_target_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "sglang.srt.mem_cache.pool_host.common"
    monkeypatch.setattr(importlib, "import_module", lambda wanted: ModuleType(wanted))
    with pytest.raises(cpu.PatchTargetGone, match=f"{name}._cuda_host_register is gone"):
        cpu._pinned_host_memory()


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


def test_adapters_of_another_sglang_are_refused() -> None:
    module = ModuleType("layers")
    with pytest.raises(cpu.PatchTargetGone, match=r"layers\.torch is gone"):
        cpu_lora._patch_layers(module)
    vars(module)["torch"] = torch
    with pytest.raises(cpu.PatchTargetGone, match=r"layers\.FusedMoEWithLoRA\._forward_with_lora is gone"):
        cpu_lora._patch_layers(module)
    with pytest.raises(cpu.PatchTargetGone, match=r"layers\.get_batch_token_counts is gone"):
        cpu_lora._lengthen(module)
    assert module.torch.tensor([1], pin_memory=True).tolist() == [1]
    assert module.torch.Tensor is torch.Tensor


def test_an_expert_of_another_rank_adds_nothing() -> None:
    module = ModuleType("native")
    with pytest.raises(cpu.PatchTargetGone, match=r"native\.moe_forward_native is gone"):
        cpu_experts._native(module)
    outputs = torch.tensor([1.0, 10.0, 100.0])

    def native(_layer: object, x: torch.Tensor, topk_output: TopK, _config: object) -> torch.Tensor:
        assert (topk_output.topk_ids >= 0).all()
        assert len(x)
        return x * (outputs[topk_output.topk_ids] * topk_output.topk_weights).sum(1, keepdim=True)

    vars(module)["moe_forward_native"] = native
    cpu_experts._native(module)
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


def test_latent_attention_of_another_sglang_is_refused() -> None:
    with pytest.raises(cpu.PatchTargetGone, match=r"handler\.AttentionBackendRegistry or AttnForwardMethod\.MLA is gone"):
        cpu_latent._absorbed(ModuleType("handler"))
    with pytest.raises(cpu.PatchTargetGone, match=r"factory\.get_rope_cpu or get_rope is gone"):
        cpu_latent._plain_positions(ModuleType("factory"))
    with pytest.raises(cpu.PatchTargetGone, match=r"correction\.apply_q_correction is gone"):
        cpu_latent._corrections(ModuleType("correction"))


def test_an_adapter_of_what_is_absorbed_is_that_of_the_merged_weight() -> None:
    """Queries times the keys' rows of kv_b_proj, and what was attended to times the values' rows."""
    draw = torch.Generator().manual_seed(0)
    heads, nope, value, small, rank = 3, 4, 5, 6, 2
    a, b = (torch.randn(3, *size, generator=draw) for size in ((4, small), (heads * (nope + value), 4)))
    batch = SimpleNamespace(
        weight_indices_cpu=torch.tensor([1, 0, 2]),
        seg_lens_cpu=torch.tensor([2, 1, 3]),
        lora_ranks_cpu=torch.tensor([0, rank, 4]),
        scalings_cpu=torch.tensor([0.0, 0.5, 2.0]),
    )
    layer = SimpleNamespace(set_lora=True, lora_backend=SimpleNamespace(batch_info=batch), A_buffer=a, B_buffer=b)
    attention = SimpleNamespace(kv_b_proj=layer, num_local_heads=heads, qk_nope_head_dim=nope, v_head_dim=value)
    queries, attended = (torch.randn(6, heads, size, generator=draw) for size in (nope, small))
    found = cpu_latent._apply_q_correction(attention, queries, torch.zeros(6, heads, small))
    out = cpu_latent._apply_v_correction(attention, attended, torch.zeros(6, heads * value)).view(6, heads, value)
    for token, slot in enumerate([1, 1, 0, 2, 2, 2]):
        r, scale = int(batch.lora_ranks_cpu[slot]), float(batch.scalings_cpu[slot])
        delta = (scale * b[slot, :, :r] @ a[slot, :r]).view(heads, nope + value, small)
        for head in range(heads):
            torch.testing.assert_close(found[token, head], queries[token, head] @ delta[head, :nope])
            torch.testing.assert_close(out[token, head], delta[head, nope:] @ attended[token, head])


@pytest.mark.parametrize("scaling", [None, {"rope_type": "deepseek_yarn"}])
def test_positions_that_are_not_scaled_are_plain(scaling: dict[str, str] | None) -> None:
    module = ModuleType("factory")
    vars(module).update(get_rope=lambda *known: ("plain", *known), get_rope_cpu=lambda *known: ("scaled", *known))
    cpu_latent._plain_positions(module)
    found = module.get_rope_cpu(8, 8, 512, 10000, False, scaling, device="cpu")
    assert found[:6] == ("plain" if scaling is None else "scaled", 8, 8, 512, 10000, False)
    assert found[6:] == ((None, None, 1.0) if scaling is None else (scaling, None, 1.0, "cpu"))


@pytest.mark.parametrize("shared", [False, True])
def test_experts_with_adapters_are_their_merged_weights(shared: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens, experts, slots, hidden, width, rank = 12, 3, 2, 8, 6, 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    w13, w2 = random(experts, 2 * width, hidden), random(experts, hidden, width)
    a13, b13 = random(slots, 1 if shared else experts, 2 * rank, hidden), random(slots, experts, 2 * width, rank)
    a2, b2 = random(slots, experts, rank, width), random(slots, 1 if shared else experts, hidden, rank)
    x, weights = random(tokens, hidden), torch.rand(tokens, 2, generator=draw)
    ids = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(tokens)])
    ids[0, 1] = -1
    of = torch.tensor([-1, 0, 1] * (tokens // 3))
    found = cpu_lora.adapted_experts(x, weights, ids, of, (w13, a13, b13), (w2, a2, b2))
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for choice in range(2):
            e, slot = int(ids[token, choice]), int(of[token])
            if e < 0:
                continue
            gate, up, down = w13[e, :width].clone(), w13[e, width:].clone(), w2[e].clone()
            if slot >= 0:
                mine = [half[slot, 0 if half.shape[1] == 1 else e] for half in (a13, b13, a2, b2)]
                gate += mine[1][:width] @ mine[0][:rank]
                up += mine[1][width:] @ mine[0][rank:]
                down += mine[3] @ mine[2]
            expected[token] += weights[token, choice] * (down @ (torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])))
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_key_that_begins_with_a_dash_is_a_key() -> None:
    """SGLang parses its command line with argparse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    assert parser.parse_args(lifetime.key_arguments({lifetime.API_KEY: "-dCY3"})).api_key == "-dCY3"
    assert lifetime.key_arguments({}) == []
