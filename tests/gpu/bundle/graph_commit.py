"""Staging and commit into parameters that a captured CUDA graph uses: `python -m tests.gpu.bundle.graph_commit RESULT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from asyncmoe.weights.receiver.weight_buffers import Weights
from tests.gpu.bundle.summary import write_outcome


def main() -> None:
    """A graph sees what was committed after its capture; nothing is allocated, and nothing moves."""
    write_outcome(Path(sys.argv[1]), {"graph_sees_commits": (_graph(), "updates")})


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


if __name__ == "__main__":
    main()
