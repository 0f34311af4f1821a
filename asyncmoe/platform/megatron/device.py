"""Where Megatron says "cuda", this machine's processor is meant.

Megatron writes `device=torch.cuda.current_device()` in some 175 places, `device="cuda"` in about 20 (gradient scalers, norms, schedules'
token counts), and `.cuda()` in a few. Only the factory functions it calls with that literal are wrapped: a global `TorchFunctionMode` would
do the same at the price of a Python call for every operation of the model.

Every name gets a function object of its own: torch's compiler keeps rules by identity and refuses one object under two names.
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
    # transformer/moe/token_dispatcher.py copies its split sizes on a side stream; shared experts overlap on one.
    replace(torch.cuda, "Stream", InertStream)
    replace(torch.cuda, "Event", InertEvent)
    replace(torch.cuda, "stream", _returning(InertStream()))
    replace(torch.cuda, "current_stream", _returning(InertStream()))
    replace(torch.cuda, "default_stream", _returning(InertStream()))


class InertEvent:
    """An event that has already happened: work on a processor is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class InertStream:
    """A stream with nothing outstanding; also the context manager `torch.cuda.stream` returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> InertStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> InertEvent:
        return InertEvent()


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _identity() -> Callable[..., Any]:
    return lambda value, *_, **__: value
