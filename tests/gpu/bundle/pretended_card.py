"""A card that is not there: `torch.cuda` over CPU tensors, with graphs that are recorded and replayed, for SGLang's Triton kernels under
Triton's interpreter.

Whatever names the device "cuda" gets a CPU tensor. Streams and events do nothing. What runs while a graph is captured is recorded,
operators of torch and kernels of Triton; a replay executes it again into the same tensors, so what Python decided then is not decided
again; and what would wait for the device is refused, as CUDA refuses it during a capture.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_GB = 1 << 30
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "repeat_interleave.Tensor", "aten.equal")
"""Parts of names of operators whose result's size or value the host waits for."""
PROPERTIES = SimpleNamespace(
    name="a pretended card", major=8, minor=0, total_memory=16 * _GB, is_integrated=False, multi_processor_count=132
)
"""Compute capability 8.0: the interpreter knows nothing of the waiting between kernels that 9.0 has."""


def install() -> None:
    """Pretend, in this process and those it forks. Triton must have been told to interpret (TRITON_INTERPRET=1) where its kernels run."""
    for name, value in _interface().items():
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0"
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    implement = Library.impl
    Library.impl = lambda self, name, function, key="", **named: implement(self, name, function, "CPU" if key == "CUDA" else key, **named)
    import torch.distributed.distributed_c10d as groups

    for name in ("init_process_group", "new_group"):
        over_gloo = _over_gloo(getattr(groups, name))
        setattr(groups, name, over_gloo)
        setattr(torch.distributed, name, over_gloo)
    _interpreter()
    _OnCpu().__enter__()


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return arguments[0]
        if name == "record_stream":
            return None
        if Graph.capturing is not None and name in ("tensor", "as_tensor") and named.get("device") != _cpu(named.get("device")):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name} from the host's memory")
        if "device" in named:
            named["device"] = "cpu" if isinstance(named["device"], int) else _cpu(named["device"])
        named.update({"pin_memory": False} if named.get("pin_memory") else {})
        return function(*(_cpu(given) if name == "to" or isinstance(given, torch.device) else given for given in arguments), **named)


def _cpu(device: Any) -> Any:
    if isinstance(device, (str, torch.device)) and str(device).split(":")[0] == "cuda":
        return torch.device("cpu")
    return device


class Stream:
    """One that is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", 0), 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def nothing(self, *_: Any, **__: Any) -> None:
        """Whatever is waited for has happened."""

    wait_stream = wait_event = synchronize = record = wait = record_event = nothing

    def query(self) -> bool:
        return True


class Graph:
    """Steps recorded during a capture."""

    capturing: Graph | None = None
    replayed = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def reset(self) -> None:
        self.steps.clear()

    def replay(self) -> None:
        """Execute them again; results go where those of the capture are."""
        Graph.replayed += 1
        with torch.no_grad():
            for function, arguments, named, result in self.steps:
                again = function(*arguments, **named)
                for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=False):
                    if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def capture(cuda_graph: Graph, **_: Any) -> Any:
    """As `torch.cuda.graph`."""
    Graph.capturing = cuda_graph
    try:
        with _Recording():
            yield
    finally:
        Graph.capturing = None
    print(f"pretended card: {len(cuda_graph.steps)} steps were captured", flush=True)


class Refusing(TorchDispatchMode):
    """Within it what waits for the device is an error."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        masks = arguments[1] if "index" in str(function) and len(arguments) > 1 and isinstance(arguments[1], (list, tuple)) else ()
        if any(name in str(function) for name in WAITS) or any(getattr(mask, "dtype", None) is torch.bool for mask in masks):
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {function}")
        return function(*arguments, **(named or {}))


class _Recording(Refusing):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        graph, Graph.capturing = Graph.capturing, None  # an operator of SGLang's starts kernels, which it starts again when replayed
        try:
            with Refusing():
                result = super().__torch_dispatch__(function, types, arguments, named)
        finally:
            Graph.capturing = graph
        assert graph is not None
        graph.steps.append((function, arguments, named or {}, result))
        return result


def _interpreter() -> None:
    """Record kernels, and multiply bfloat16: the interpreter keeps it as uint16 and multiplies the patterns."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    run, dot = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder.create_dot

    def recorded(self: Any, *arguments: Any, **named: Any) -> None:
        if Graph.capturing is not None:
            Graph.capturing.steps.append((lambda *a, **n: run(self, *a, **n), arguments, named, None))
        with _disable_current_modes():
            run(self, *arguments, **named)

    def wide(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.GridExecutor.__call__ = recorded
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)


def _over_gloo(function: Any) -> Any:
    def called(*arguments: Any, **named: Any) -> Any:
        named.pop("device_id", None)
        named.update({"backend": "gloo"} if "nccl" in str(named.get("backend")) else {})
        return function(*("gloo" if given == "nccl" else given for given in arguments), **named)

    return called


def _interface() -> dict[str, Any]:
    class Device(contextlib.nullcontext):
        def __init__(self, _: Any = None) -> None:
            super().__init__()

    def answering(answer: Any) -> Any:
        return lambda *_, **__: answer  # one each: torch's compiler wants no function under two names

    zeros = ("memory_allocated", "max_memory_allocated", "memory_reserved", "current_device")
    nothing = (
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
        "_lazy_init",
    )
    silent = {name: answering(0) for name in zeros} | {name: answering(None) for name in nothing}
    return silent | {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda *_: PROPERTIES,
        "mem_get_info": lambda *_: (12 * _GB, 16 * _GB),
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: Graph.capturing is not None,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": contextlib.nullcontext,
        "StreamContext": contextlib.nullcontext,
        "device": Device,
        "Stream": Stream,
        "Event": Stream,
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, 1),
    }  # fmt: skip
