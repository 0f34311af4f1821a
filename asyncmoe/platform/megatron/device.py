"""Maps Megatron's "cuda" device to the CPU.

Megatron has `device=torch.cuda.current_device()` in some 175 places, `device="cuda"` in about 20 (gradient scalers, norms, token counts
of schedules), and `.cuda()` in a few. Only the factory functions called with "cuda" are wrapped, because a global
`TorchFunctionMode` would cost a Python call for every operation of the model.

Every name gets its own function object, because torch's compiler keeps rules by identity and refuses one object under two names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from asyncmoe.platform.megatron.patch import replace, wrap

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like")


def install() -> None:
    """Replace the device functions of `torch.cuda` and the device argument of the factory functions."""
    replace(torch.cuda, "current_device", _returning(CPU))
    replace(torch.cuda, "set_device", _returning(None))
    replace(torch.cuda, "synchronize", _returning(None))
    replace(torch.cuda, "empty_cache", _returning(None))
    replace(torch.cuda, "memory_allocated", _returning(0))
    replace(torch.cuda, "max_memory_allocated", _returning(0))
    replace(torch.Tensor, "cuda", _identity())
    replace(torch.nn.Module, "cuda", _identity())
    for name in _FACTORIES:
        wrap(torch, name, _on_cpu)
    # transformer/moe/token_dispatcher.py copies split sizes on a side stream, and shared experts overlap on one.
    replace(torch.cuda, "Stream", InertStream)
    replace(torch.cuda, "Event", InertEvent)
    replace(torch.cuda, "stream", _returning(InertStream()))
    replace(torch.cuda, "current_stream", _returning(InertStream()))
    replace(torch.cuda, "default_stream", _returning(InertStream()))


class InertEvent:
    """An event that is always complete, because CPU work is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


class InertStream:
    """A stream without pending work; also the context manager that `torch.cuda.stream` returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> InertStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> InertEvent:
        return InertEvent()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):  # as models/common/embeddings/rope_utils.py asks for; only a GPU reads pinned memory
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _identity() -> Callable[..., Any]:
    return lambda value, *_, **__: value
