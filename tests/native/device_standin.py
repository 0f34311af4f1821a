"""A machine of two GPUs on a CPU: csrc/device.cu on a stand-in of the CUDA runtime, the copy kernel emulated, torch's side of it.

What it keeps of the real thing is what threads get wrong: the current device is each thread's own and 0 at first, memory is a device's and
finite, a device has a context in this process once anything needed one, torch exports only what is on the current device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import asyncmoe
import asyncmoe.reshard._C as _C
from asyncmoe.reshard.chunks import trailer_offset

ROOT = Path(asyncmoe.__file__).parents[1]
TOTAL = 1 << 30
_MODULES = ("gpu", "memory", "device_threads", "programs", "delta_work")
"""Of asyncmoe.reshard: those that call what the extension has of a device."""


def build(folder: Path) -> Path:
    """The shared library of the stand-in: a copy for each module of tests, whose machine it is."""
    return Path(shutil.copy(Path(_compiled().name) / "fake_cuda.so", folder))


@cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    folder, here = tempfile.TemporaryDirectory(prefix="fake-cuda-"), Path(__file__).parent / "fake_cuda"
    # Without unique symbols: otherwise all libraries of a process are one machine.
    options = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-fno-gnu-unique", f"-I{here}", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["g++", *options, "-o", f"{folder.name}/fake_cuda.so", str(here / "shim.cpp")], check=True, timeout=120)
    return folder


class Machine:
    """The stand-in's library, and the extension and torch as they are on it.

    Attributes:
        relieved: how often torch was asked to give back what it keeps.
    """

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        for name in ("memory", "open", "stream", "event", "address", "stream_handle"):
            getattr(self._lib, f"fake_{name}").restype = ctypes.c_void_p
        self._lib.fake_error.restype = ctypes.c_char_p
        self._lib.fake_free.restype = self._lib.fake_device_memory.restype = ctypes.c_size_t
        self.relieved = 0
        self.on_relief: Callable[[], None] = lambda: None
        self.reset()

    def reset(self, free: int = TOTAL) -> None:
        """No contexts, nothing asked back, and so much memory on each device."""
        self._lib.fake_reset(ctypes.c_size_t(free))

    def free(self, device: int) -> int:
        return int(self._lib.fake_free(device))

    @property
    def contexts(self) -> set[int]:
        """Devices on which this process has a context."""
        found = self._lib.fake_contexts()
        return {device for device in range(2) if found >> device & 1}

    @property
    def current(self) -> int:
        """The calling thread's device."""
        return int(self._lib.fake_current())

    def call(self, name: str, *arguments: Any) -> Any:
        self._lib.fake_clear()
        found = getattr(self._lib, f"fake_{name}")(*arguments)
        if kind := self._lib.fake_kind():
            raise (MemoryError if kind == 2 else RuntimeError)(self._lib.fake_error().decode())
        return found

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        extension = Extension(self)
        for name in _MODULES:
            monkeypatch.setattr(f"asyncmoe.reshard.{name}._C", extension)
        for name, value in torch_cuda(self).items():
            monkeypatch.setattr(torch.cuda, name, value)


class Extension:
    """asyncmoe.reshard._C as a build with CUDA has it (csrc/cuda_bindings.cpp)."""

    CUDA = True

    def __init__(self, machine: Machine) -> None:  # noqa: C901  classes that share the machine, as a module's would
        class DeviceMemory:
            def __init__(self, device: int, nbytes: int, made: int | None = None) -> None:
                self.nbytes = nbytes
                self._made = ctypes.c_void_p(made or machine.call("memory", device, ctypes.c_int64(nbytes)))

            @classmethod
            def open(cls, device: int, nbytes: int, handle: bytes) -> DeviceMemory:
                return cls(device, nbytes, machine.call("open", device, ctypes.c_int64(nbytes), handle))

            @property
            def address(self) -> int:
                return int(machine.call("address", self._made))

            def handle(self) -> bytes:
                bytes_of = ctypes.create_string_buffer(64)
                machine.call("handle", self._made, bytes_of)
                return bytes_of.raw

            def __del__(self) -> None:
                if hasattr(self, "_made"):
                    machine._lib.fake_memory_end(self._made)

        class DeviceStream:
            def __init__(self, device: int) -> None:
                self._made = ctypes.c_void_p(machine.call("stream", device))
                self.handle = int(machine.call("stream_handle", self._made))

            def __del__(self) -> None:
                machine._lib.fake_stream_end(self._made)

        class DeviceEvent:
            def __init__(self, device: int) -> None:
                self._made = ctypes.c_void_p(machine.call("event", device))

            def record(self, stream: int) -> None:
                machine.call("record", self._made, ctypes.c_size_t(stream))

            def done(self) -> bool:
                return bool(machine.call("done", self._made))

            def wait(self, timeout_s: float) -> bool:
                return self.done()

            def hold(self, stream: int) -> None:
                pass

            def __del__(self) -> None:
                machine._lib.fake_event_end(self._made)

        class DeviceProgram:
            """The emulated kernel, and what csrc/copy.cu does around it with a message's digest. Its tables take a page."""

            def __init__(self, program: Any, device: int) -> None:
                self._program, self._table, self._mismatch = program, DeviceMemory(device, 4096), -1

            def run(self, chunk: int, sources: np.ndarray, destinations: np.ndarray, seal: int, stream: int) -> None:
                sealed = _C.emulate_cuda(self._program, chunk, sources, destinations, 2) ^ seal
                wire = extension.wires.get(id(self._program), "none")
                if wire == "none":
                    return
                message = int((sources if wire == "source" else destinations)[0])
                trailer = ctypes.c_uint64.from_address(message + trailer_offset(self._program.bytes(chunk)))
                if wire == "destination":
                    trailer.value = sealed
                elif trailer.value != sealed and self._mismatch < 0:
                    self._mismatch = chunk

            def take_mismatch(self) -> int:
                found, self._mismatch = self._mismatch, -1
                return found

        class DeviceDelta:
            """The emulated kernels of deltas (csrc/delta.cu). Tables take a page."""

            def __init__(self, table: Any, device: int) -> None:
                self._delta, self._table, self._found = table, DeviceMemory(device, 4096), (0, 0, 0)

            def encode(self, chunk: int, now: int, base: int, payload: int, stream: int) -> None:
                self._found = _C.emulate_delta_encode(self._delta, chunk, now, base, payload)

            def apply(self, chunk: int, payload: int, nbytes: int, bases: np.ndarray, write: bool, stream: int) -> None:
                self._found = _C.emulate_delta_apply(self._delta, chunk, payload, nbytes, bases, write)

            def read(self, chunk: int, bases: np.ndarray, message: int, stream: int) -> None:
                self._found = _C.emulate_delta_read(self._delta, chunk, bases, message)

            def take(self) -> tuple[int, int, int]:
                return self._found

        extension = self
        self.DeviceDelta = DeviceDelta
        self.wires: dict[int, str] = {}
        self.DeviceMemory, self.DeviceStream, self.DeviceEvent, self.DeviceProgram = DeviceMemory, DeviceStream, DeviceEvent, DeviceProgram

        def make_program(*arguments: Any) -> Any:
            made = _C.Program(*arguments)
            self.wires[id(made)] = arguments[2]
            return made

        self.Program = make_program
        self.copy_plainly = lambda device, to, source, nbytes, stream: ctypes.memmove(to, source, nbytes)
        self.cuda_device_count = lambda: 2
        self.swap_device = lambda device: machine.call("swap", device)
        self.restore_device = lambda device: machine.call("restore", device)
        self.device_memory = lambda device: (int(machine.call("device_memory", device)), TOTAL)

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)


class TorchStream:
    """torch.cuda.Stream."""

    def __init__(self, machine: Machine, device: Any) -> None:
        self.device = torch.device(device)
        self._stream = Extension(machine).DeviceStream(self.device.index)
        self.cuda_stream = self._stream.handle

    def wait_stream(self, other: object) -> None:
        pass


def torch_cuda(machine: Machine) -> dict[str, Any]:
    """What of torch.cuda is used here."""
    using = threading.local()

    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        before, using.stream = getattr(using, "stream", None), stream
        yield
        using.stream = before

    def empty_cache() -> None:
        machine.relieved += 1
        machine.on_relief()

    return {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: machine.current,
        "set_device": lambda device: machine.call("swap", torch.device("cuda", device).index if isinstance(device, int) else device.index),
        "Stream": lambda device: TorchStream(machine, device),
        "stream": within,
        "current_stream": lambda device=None: getattr(using, "stream", None),
        "synchronize": lambda device=None: None,
        "empty_cache": empty_cache,
        "mem_get_info": lambda device: (machine.free(torch.device(device).index), TOTAL),
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
        "can_device_access_peer": lambda device, peer: True,
    }


class OnDevice1(torch.Tensor):
    """A tensor of "cuda:1" in host memory; so is what is made from it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)

    def __dlpack__(self, **_: Any) -> Any:
        """As torch/_tensor.py has it."""
        if torch.cuda.current_device() != 1:
            raise BufferError(
                f"Can't export tensors on a different CUDA device index. Expected: 1. Current device: {torch.cuda.current_device()}."
            )
        raise AssertionError("an address can be had without DLPack")


def on_device1(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).as_subclass(OnDevice1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The stand-in, installed for a module's tests."""
    made = Machine(build(tmp_path_factory.mktemp("cuda")))
    with pytest.MonkeyPatch.context() as patch:
        made.install(patch)
        yield made
