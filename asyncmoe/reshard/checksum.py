"""Compute the checksums that an engine reports for its weights.

SGLang hashes a tensor on its device (sglang 0.5.23: `_hash_tensor` in srt/utils/weight_checker.py, `tensor_hash` in
srt/managers/mm_utils.py): with SHA-256 on a CPU, with its own kernels on a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import numpy as np

from asyncmoe.errors import LayoutError
from asyncmoe.reshard.memory import Array, memory_of

_MIX = (0x85EBCA6B, 0xC2B2AE35)
_PLACE = (0x27D4EB2D, 0x165667B1)
_SEED = 0x243F6A88
_TILE = 8192
"""Number of words summed into one hash."""
_AT_A_TIME = 16 * _TILE
"""Number of words processed at a time: their intermediate values fit in a core's cache."""


def engine_checksums(parameters: Mapping[str, Array], device: str = "cpu") -> dict[str, str]:
    """Return the checksums SGLang's `/weights_checker {"action": "checksum"}` reports for parameters, 16 hexadecimal digits each.

    Args:
        parameters: by SGLang's name, row-major, in the engine's dtype, in host memory.
        device: the device that the engine reports: "cpu" or "cuda".

    Raises:
        LayoutError: a parameter is not a row-major array in host memory.
    """
    return {name: f"{_HASHES[device](_content(name, array)):016x}" for name, array in parameters.items()}


def gpu_hash(content: np.ndarray) -> int:
    """Compute the 64-bit hash of SGLang's GPU kernels (sglang 0.5.23, kernels/ops/memory/gpu_tensor_hash.py).

    Little-endian 32-bit words, zero-padded, are mixed with their position in two ways and summed modulo 2^32 in tiles of 8192. Each tile's
    two sums are mixed into the halves of a 64-bit word; the sum of these words modulo 2^64 is mixed once more. The hash of no bytes is 0.

    Args:
        content: uint8[n].
    """
    count = -(-len(content) // 4)
    if count == 0:
        return 0
    seeds = _SEED, (_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF
    total = 0
    for first in range(0, count, _AT_A_TIME):
        words = _words(content[4 * first : 4 * (first + _AT_A_TIME)])
        places = np.arange(first, first + len(words), dtype=np.uint32)
        high, low = (
            _tile_sums(words, places, multiplier, seed, turn, 4 * count & 0xFFFFFFFF)
            for multiplier, seed, turn in zip(_PLACE, seeds, (15, 13), strict=True)
        )
        total += int((high.astype(np.uint64) << np.uint64(32) | low).sum(dtype=np.uint64))
    return _finish(total)


def _sha256(content: np.ndarray) -> int:
    """Return the first 8 bytes of SHA-256 as a big-endian integer."""
    return int.from_bytes(hashlib.sha256(content.data).digest()[:8], "big")


_HASHES = {"cpu": _sha256, "cuda": gpu_hash}


def _words(content: np.ndarray) -> np.ndarray:
    """Return uint8[n] as uint32[ceil(n / 4)], zero-padded."""
    missing = -len(content) % 4
    filled = np.concatenate([content, np.zeros(missing, np.uint8)]) if missing else content
    return filled.view("<u4")


def _tile_sums(words: np.ndarray, places: np.ndarray, multiplier: int, seed: int, turn: int, nbytes: int) -> np.ndarray:
    """Return the mixed sums uint32[tiles] of words that start at a tile boundary."""
    mixed = places * np.uint32(multiplier)
    mixed += np.uint32(seed)
    mixed ^= places << np.uint32(turn)
    mixed ^= places >> np.uint32(32 - turn)  # the two shifts have no bit in common: together they rotate the place
    mixed ^= words
    _mix(mixed)
    sums = np.add.reduceat(mixed, np.arange(0, len(mixed), _TILE), dtype=np.uint32)
    sums ^= np.uint32(nbytes)
    return _mix(sums)


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's 32-bit finaliser in place."""
    for shift, multiplier in zip((16, 13), _MIX, strict=True):
        values ^= values >> np.uint32(shift)
        values *= np.uint32(multiplier)
    values ^= values >> np.uint32(16)
    return values


def _finish(total: int) -> int:
    """Apply SplitMix64's finaliser."""
    word = (1 << 64) - 1
    total &= word
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ total >> shift) * multiplier & word
    return total ^ total >> 31


def _content(name: str, array: Array) -> np.ndarray:
    """Return a view of an array's bytes, uint8[n]; valid only while the array exists."""
    memory = memory_of(array, name)
    if memory.device != "cpu":
        raise LayoutError(name, got=memory.device, expected="cpu")
    if not memory.nbytes:
        return np.empty(0, np.uint8)
    found: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))
    return found
