"""The checksums an engine reports of its weights, computed from arrays of ours."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.memory import Array, memory_of


def engine_checksums(parameters: Mapping[str, Array]) -> dict[str, str]:
    """What SGLang's `/weights_checker {"action": "checksum"}` reports for parameters in host memory.

    The first 8 bytes, big-endian, as 16 hexadecimal digits, of the SHA-256 of a parameter's contiguous bytes (sglang 0.5.23:
    `tensor_hash` in managers/mm_utils.py, `_hash_tensor` in utils/weight_checker.py). Engines on a GPU hash otherwise.

    Args:
        parameters: by SGLang's name, row-major, in the engine's dtype.

    Raises:
        LayoutError: something that is not a row-major array in host memory.
    """
    return {name: _checksum(name, array) for name, array in parameters.items()}


def _checksum(name: str, array: Array) -> str:
    memory = memory_of(array, name)
    if memory.device != "cpu":
        raise LayoutError(name, got=memory.device, expected="cpu")
    content = (ctypes.c_ubyte * memory.nbytes).from_address(memory.address) if memory.nbytes else b""
    return hashlib.sha256(content).hexdigest()[:16]
