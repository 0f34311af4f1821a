"""The CUDA kernel against the CPU's copies. Needs a GPU and an extension built with CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reshard_ranks import filled, numbered
from test_reshard_copy import check_box

import asyncmoe.reshard._C as _C
from asyncmoe.models import MegatronParallel, family_of
from asyncmoe.reshard import LocalTransport, exchange, plan

pytestmark = pytest.mark.skipif(_C.cuda_device_count() == 0 or not torch.cuda.is_available(), reason="no GPU, or no CUDA kernels built")


def on_gpu(rows: np.ndarray, source: np.ndarray, destination: np.ndarray) -> None:
    there, back = torch.from_numpy(source).cuda(), torch.from_numpy(destination).cuda()
    _C.copy_cuda(rows, np.array([there.data_ptr()]), np.array([back.data_ptr()]), 0, torch.cuda.current_stream().cuda_stream)
    destination[:] = back.cpu().numpy()


@pytest.mark.parametrize("item", [1, 2, 4, 8])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(
    ("extent", "gaps", "order", "offset"),
    [
        ((1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 2, 3), 0),
        ((1, 1, 1, 100003), (0, 0, 0, 0), (0, 1, 2, 3), 1),
        ((3, 5, 64, 128), (0, 0, 0, 0), (0, 1, 2, 3), 0),
        ((3, 5, 64, 128), (0, 1, 0, 16), (0, 1, 2, 3), 8),
        ((3, 5, 63, 127), (1, 2, 1, 1), (0, 1, 2, 3), 3),
        ((2, 7, 33, 40), (0, 0, 3, 0), (3, 0, 2, 1), 2),
        ((1, 1, 3000, 2048), (0, 0, 0, 2048), (0, 1, 2, 3), 0),
    ],
)
def test_boxes(item: int, fill: bool, extent: tuple[int, ...], gaps: tuple[int, ...], order: tuple[int, ...], offset: int) -> None:
    check_box(on_gpu, item, extent, gaps, order, offset, fill)


def test_a_model_is_resharded_on_the_gpu() -> None:
    hf = {
        "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }  # fmt: skip
    family = family_of(hf)
    tensors, checkpoint = family.tensors(hf), family.hf_layout(hf, "int32")
    values = numbered(tensors)
    layout = family.megatron_layout(hf, MegatronParallel(tp=2, ep=2), 1, "int32")
    source = {name: torch.from_numpy(array).cuda() for name, array in filled(checkpoint, values).items()}
    got = {name: torch.full(storage.shape, -1, dtype=torch.int32, device="cuda") for name, storage in layout.storages.items()}
    stream = torch.cuda.current_stream().cuda_stream
    exchange(plan(tensors, [checkpoint.at(1)], [layout]), LocalTransport(1), source, got, stream=stream)
    for name, expected in filled(layout, values).items():
        np.testing.assert_array_equal(got[name].cpu().numpy(), expected, err_msg=name)
