"""Staging and commit into parameters that a captured CUDA graph uses: `python -m tests.gpu.bundle.graph_commit RESULT`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from asyncmoe.weights.receiver.weight_buffers import Tensors, Weights
from tests.gpu.bundle.summary import write_outcome

_SHARE = 0.2
"""Of the card's free memory, for a shard; its staging memory and a third copy to compare with take as much each."""
_SHARD_BYTES = 8 << 30
_ROUNDS = 11


def main() -> None:
    """A graph sees what was committed after its capture; nothing is allocated, and nothing moves; and what a large commit takes."""
    figures: dict[str, tuple[Any, str]] = {"graph_sees_commits": (_graph(), "updates")}
    figures |= _cost(min(_SHARD_BYTES, int(torch.cuda.mem_get_info(0)[0] * _SHARE)))
    write_outcome(Path(sys.argv[1]), figures)


def _graph(updates: int = 5) -> int:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to("cuda", torch.bfloat16).requires_grad_(False)
    given = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = model(given)
    model(given)  # cuBLAS allocates a workspace for each stream that it is first used on
    target = Weights(model)
    places = {name: tensor.data_ptr() for name, tensor in target.tensors().items()}
    staged = target.room()
    held = torch.cuda.memory_allocated()
    for update in range(updates):
        for tensor in staged.values():
            tensor.normal_()
        wanted = {name: tensor.clone() for name, tensor in staged.items()}
        held_now = torch.cuda.memory_allocated()
        staged = target.commit(staged)
        assert torch.cuda.memory_allocated() == held_now, "a commit allocated memory"
        graph.replay()
        assert {name: tensor.data_ptr() for name, tensor in target.tensors().items()} == places, "a commit moved a parameter"
        hidden = torch.nn.functional.linear(given, wanted["0.weight"], wanted["0.bias"])
        expected = torch.nn.functional.linear(hidden, wanted["1.weight"], wanted["1.bias"])
        torch.testing.assert_close(seen, expected, msg=f"update {update}: the graph computes with other weights than were committed")
        del wanted, hidden, expected
    left = torch.cuda.memory_allocated() - held
    assert left == 0, f"updates left {left} bytes behind"
    return updates


def _cost(nbytes: int) -> dict[str, tuple[Any, str]]:
    """Milliseconds of a commit of so many bytes next to plain copies of the same, turn by turn, by the device's own clock."""
    columns = 4096
    rows = nbytes // 2 // columns // 16
    layers = [torch.nn.Linear(columns, rows, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(16)]
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    target = Weights(model)
    staged = target.room()
    spare = {name: torch.empty_like(tensor) for name, tensor in staged.items()}
    moved = sum(tensor.nbytes for tensor in staged.values())
    for tensor in staged.values():
        tensor.normal_()
    commits, copies = [], []
    for turn in range(_ROUNDS + 2):
        elapsed, staged = _commit(target, staged)
        plain = _copy(staged, spare)
        if turn >= 2:
            commits.append(elapsed)
            copies.append(plain)
    share = median(ours / plain for ours, plain in zip(commits, copies, strict=True))
    return {
        "shard": (moved, "bytes"),
        "commit": (round(median(commits), 3), "ms"),
        "copy": (round(median(copies), 3), "ms"),
        "commit_over_copy": (round(share, 3), "times"),
        "copy_rate": (round(2 * moved / median(copies) / 1e9, 3), "TB/s, read and written"),
    }


def _commit(target: Weights, staged: Tensors) -> tuple[float, Tensors]:
    begin, end = _events()
    begin.record()
    free = target.commit(staged)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)), free


def _copy(source: Tensors, destination: Tensors) -> float:
    begin, end = _events()
    begin.record()
    for name, tensor in source.items():
        destination[name].copy_(tensor)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    torch.cuda.synchronize()
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


if __name__ == "__main__":
    main()
