"""Memory of an engine's tensors on a CPU, given to the kernel and taken again."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from asyncmoe.platform.sglang.cpu_memory import CpuMemorySaver

PAGES = 64


def blocks(tensor: torch.Tensor) -> int:
    """Bytes that the file of a tensor in shared memory occupies."""
    found = re.search(rf"^{tensor.data_ptr():x}-.* (/dev/shm/\S+)", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert found is not None
    (file,) = (fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.readlink(fd).startswith(found[1]))
    return file.stat().st_blocks * 512


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the whole pages within a tensor that are in memory."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE)
    count = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE - begin
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * begin)
        entries = torch.frombuffer(bytearray(file.read(8 * count)), dtype=torch.int64)
    return int((entries < 0).sum()) * mmap.PAGESIZE


def test_only_what_was_made_in_a_region_goes() -> None:
    """Small tensors alternate with others in the same pages; a view and a result in place of another tensor stay with it."""
    saver, model, others = CpuMemorySaver(), torch.nn.Module(), [torch.arange(700.0)]
    with saver.region("weights"):
        view = others[0].add_(1)[:10]
        model.scale = torch.tensor(0.5)
    for number in range(200):
        with saver.region("weights"):
            model.register_buffer(f"b{number}", torch.arange(700.0) + number)
        others.append(torch.arange(700.0) + number + 1)
    with saver.region("kv_cache"):
        cache = torch.ones(100_000)
    saver.pause("weights")
    saver.resume("weights")
    assert saver.poisoned(model) == {"scale": "1 of 1"} | {f"b{number}": "700 of 700" for number in range(200)}
    assert all(torch.equal(other, torch.arange(700.0) + max(1, at)) for at, other in enumerate(others))
    assert view.tolist() == list(range(1, 11))
    assert cache.sum() == len(cache)
    for tensor in (*model.buffers(), model.scale):
        assert tensor.isnan().all()
        tensor.fill_(1)
    model.b7[3:5].view(torch.int32).fill_(-1)
    assert saver.poisoned(model) == {"b7": "2 of 700"}


@pytest.mark.parametrize("shared", [False, True])
def test_pages_are_free_until_they_are_taken_again(shared: bool) -> None:
    saver = CpuMemorySaver()
    with saver.region("kv_cache"):
        tensor = torch.ones(PAGES * mmap.PAGESIZE)
        if shared:
            tensor.share_memory_()
    taken = blocks if shared else resident
    address, before = tensor.data_ptr(), taken(tensor)
    assert before >= tensor.nbytes - 2 * mmap.PAGESIZE
    saver.pause("kv_cache")
    assert taken(tensor) <= mmap.PAGESIZE
    saver.resume("kv_cache")
    assert (tensor.data_ptr(), taken(tensor)) == (address, before)
    assert tensor.isnan().all()


def test_a_backup_comes_back() -> None:
    saver = CpuMemorySaver()
    with saver.region("weights", enable_cpu_backup=True):
        tensors = [torch.randn(5000), torch.arange(3)]
    for value in (1, 2):
        tensors[1][0] = value
        kept = [tensor.clone() for tensor in tensors]
        saver.pause("weights")
        assert resident(tensors[0]) == 0
        saver.resume("weights")
        assert all(map(torch.equal, tensors, kept))
