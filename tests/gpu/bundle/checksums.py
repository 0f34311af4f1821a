"""SGLang's hash of tensors on a GPU against ours of the same bytes on the host: `python -m tests.gpu.bundle.checksums RESULT`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import torch

from asyncmoe.reshard.checksum import gpu_hash
from tests.gpu.bundle.summary import write_outcome

SIZES = (1, 3, 4, 5, 4096, 32_768, 32_769, 1_000_003, 64 << 20)
"""Bytes; a tile of the hash is 32 KiB."""


def main() -> None:
    theirs = importlib.import_module("sglang.kernels.ops.memory.gpu_tensor_hash").gpu_tensor_hash
    random = np.random.default_rng()
    for nbytes in SIZES:
        content = random.integers(0, 256, nbytes, np.uint8)
        expected, got = theirs(torch.from_numpy(content).cuda()), gpu_hash(content)
        if got != expected:
            sys.exit(f"hash of {nbytes} bytes: got {got:016x}, expected SGLang's {expected:016x}")
    write_outcome(Path(sys.argv[1]), {"equal": (len(SIZES), "tensors"), "largest": (max(SIZES), "bytes")})


if __name__ == "__main__":
    main()
