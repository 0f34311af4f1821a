"""Memory of an engine's tensors on a CPU, given to the kernel and taken again."""

from __future__ import annotations

import mmap

import pytest
import torch

from asyncmoe.platform.sglang.cpu_memory import CpuMemorySaver


def test_only_what_was_made_in_a_region_goes() -> None:
    """Small tensors alternate with others in the same pages; a view and a result in place of another tensor stay with it."""
    saver, model, others = CpuMemorySaver(), torch.nn.Module(), [torch.arange(700.0)]
    with saver.region("weights"):
        view = others[0].add_(1)[:10]
        model.scale = torch.tensor(0.5)
    for number in range(200):
        with saver.region("weights"):
            model.register_buffer(f"b{number}", torch.arange(700.0))
        others.append(torch.arange(700.0) + 1)
    with saver.region("kv_cache"):
        others.append(torch.arange(700.0) + 1)
    saver.pause("weights")
    saver.resume("weights")
    assert saver.poisoned(model) == {"scale": "1 of 1"} | {f"b{number}": "700 of 700" for number in range(200)}
    assert all(torch.equal(other, torch.arange(700.0) + 1) for other in others)
    assert view.tolist() == list(range(1, 11))
    for tensor in (*model.buffers(), model.scale):
        assert tensor.isnan().all()
        tensor.fill_(1)
    model.b7[3:5].view(torch.int32).fill_(-1)
    assert saver.poisoned(model) == {"b7": "2 of 700"}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("backup", [False, True])
def test_pages_go_and_come_again(shared: bool, backup: bool) -> None:
    """Those that the kernel took read as zeros."""
    saver, page = CpuMemorySaver(), mmap.PAGESIZE // 4
    with saver.region("kv_cache", enable_cpu_backup=backup):
        tensor = torch.ones(64 * page)
        if shared:
            tensor.share_memory_()
    for value in (1.0, 2.0):
        tensor.fill_(value)
        address = tensor.data_ptr()
        saver.pause("kv_cache")
        assert tensor.count_nonzero() < 2 * page
        saver.resume("kv_cache")
        assert tensor.data_ptr() == address
        assert (tensor == value if backup else tensor.isnan()).all()
