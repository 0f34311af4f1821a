"""Runs Megatron's random-state tracker on the CPU generator.

`tensor_parallel/random.py` keeps a generator state for each kind of parallel region and swaps it in and out, also around recomputed
layers. Without CUDA there is only the CPU generator, so all of its "CUDA" states are the CPU's.
"""

from __future__ import annotations

import logging

import torch

from asyncmoe.platform.megatron.patch import module, replace


def install() -> None:
    """Replace the state accessors of `torch.cuda` and Megatron's own ones."""
    tracker = module("tensor_parallel.random")
    replace(torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    replace(torch.cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    replace(torch.cuda, "manual_seed", lambda seed: torch.manual_seed(seed))
    replace(tracker, "_get_cuda_rng_state", _get)
    replace(tracker, "_set_cuda_rng_state", _set)
    logging.getLogger(tracker.__name__).addFilter(_not_about_cpu_state)


def _get(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _not_about_cpu_state(record: logging.LogRecord) -> bool:
    """Drop `fork`'s warning about a CPU state that changed in a GPU region, because both are the same state here."""
    return "CPU RNG state changed" not in record.getMessage()
