"""What an exchange does around a GPU's copies, with the kernel emulated: one wire format, and damage is found at the end of a run."""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from reshard_ranks import blank, filled, numbered, wired_transports

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, LayoutError, TransferError, WaitTimeout
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, RankLayout, Transport, plan

module = importlib.import_module("asyncmoe.reshard.exchange")
SHAPES = {"w": (61, 90)}
GPU_RANK = 1


class EmulatedCopies:
    """`GpuCopies`, with the digest's trailer as csrc/copy.cu deals with it; work is done only when it is waited for."""

    device = "cuda:0"

    def __init__(self, device: str, stream: int, programs: Sequence[_C.Program], relieve: Callable[[], None]) -> None:
        self._sizes = {id(program): program for program in programs}
        self._found: dict[int, int] = {}
        self.stalled = False

    def run(self, program: _C.Program, chunk: int, sources: np.ndarray, destinations: np.ndarray, seal: int) -> None:
        assert id(program) in self._sizes
        sealed = _C.emulate_cuda(program, chunk, sources, destinations, 2) ^ seal
        side = SIDES.get(id(program))
        if side is None:
            return
        message = int((sources if side == "source" else destinations)[0])
        trailer = module._trailer(np.array([message]), program.bytes(chunk))
        if side == "destination":
            trailer.value = sealed
        elif trailer.value != sealed:
            self._found.setdefault(id(program), chunk)

    def finish(self, timeout_s: float) -> None:
        if self.stalled:
            raise WaitTimeout(self.device, "the copies enqueued on its stream", timeout_s)

    def mismatch(self, program: _C.Program) -> int:
        return self._found.pop(id(program), -1)


SIDES: dict[int, str] = {}


def striped(rank: int, by_column: bool) -> RankLayout:
    builder = LayoutBuilder(rank, "int16")
    rows = (31, 30)
    builder.stack("w", [("w", Box((0, 45 * rank), (61, 45)) if by_column else Box((31 * rank, 0), (rows[rank], 90)))])
    return builder.build()


@pytest.fixture
def exchangers(monkeypatch: pytest.MonkeyPatch) -> list[Exchanger]:
    """Of two ranks; that of `GPU_RANK` thinks its arrays are on a GPU."""
    monkeypatch.setattr(module, "GpuCopies", EmulatedCopies)
    made = plan(SHAPES, [striped(r, False) for r in range(2)], [striped(r, True) for r in range(2)])
    transports: list[Transport] = wired_transports(2)
    found = []
    for rank in range(2):
        device = "cuda:0" if rank == GPU_RANK else "cpu"
        monkeypatch.setattr(module, "device_of", lambda memories, what, device=device: device)
        exchanger = Exchanger(made, transports[rank], bucket_bytes=1001, timeout_s=20, threads=1)
        exchanger.bind(filled(striped(rank, False), numbered(SHAPES, np.int16), np.int16), blank(striped(rank, True), np.int16))
        SIDES.update({id(p): "destination" for p in exchanger._packs} | {id(p): "source" for p in exchanger._unpacks})
        found.append(exchanger)
    return found


def run_both(exchangers: list[Exchanger]) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        try:
            exchangers[rank].run()
        except BaseException as error:  # noqa: BLE001 (looked at by the test)
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_a_gpu_and_a_cpu_understand_each_other(exchangers: list[Exchanger]) -> None:
    for _ in range(3):
        assert run_both(exchangers) == [None, None]
        for rank in range(2):
            got = exchangers[rank]._bound[1]  # type: ignore[index]
            for name, expected in filled(striped(rank, True), numbered(SHAPES, np.int16), np.int16).items():
                np.testing.assert_array_equal(got[name], expected)
                got[name].fill(-1)


@pytest.mark.parametrize("place", [0, -1])
def test_damage_is_found_at_the_end_of_a_run(exchangers: list[Exchanger], monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """In the content and in the digest of the second message to the GPU."""
    transport, sent = exchangers[1 - GPU_RANK]._link._transport, itertools.count(1)  # type: ignore[attr-defined]
    send = transport.exchange

    def damaging(sends: Sequence[tuple[int, np.ndarray]], receives: Sequence[tuple[int, np.ndarray]], timeout_s: float) -> None:
        if next(sent) == 2:
            sends[0][1][place] ^= 1
        send(sends, receives, timeout_s)

    monkeypatch.setattr(transport, "exchange", damaging)
    errors = run_both(exchangers)
    assert errors[1 - GPU_RANK] is None
    assert isinstance(errors[GPU_RANK], TransferError)
    assert "from rank 0 to rank 1: message 2 of" in str(errors[GPU_RANK])
    with pytest.raises(InvariantBroken, match="make a new one"):
        exchangers[GPU_RANK].run()


def test_copies_that_never_end(exchangers: list[Exchanger]) -> None:
    exchangers[GPU_RANK]._gpu.stalled = True  # type: ignore[union-attr]
    errors = run_both(exchangers)
    assert isinstance(errors[GPU_RANK], WaitTimeout)
    assert "cuda:0" in str(errors[GPU_RANK])


@pytest.mark.skipif(_C.CUDA, reason="this build has CUDA kernels")
def test_a_build_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(SHAPES, [striped(0, False), striped(1, False)], [striped(0, True)])
    monkeypatch.setattr(module, "device_of", lambda memories, what: "cuda:0")
    exchanger = Exchanger(made, wired_transports(2)[0])
    with pytest.raises(LayoutError, match=r"got cuda:0, expected cpu.*ASYNCMOE_CUDA=1"):
        exchanger.bind(blank(striped(0, False), np.int16), blank(striped(0, True), np.int16))


@pytest.mark.skipif(_C.cuda_device_count() > 0, reason="there is a GPU")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    script = "from asyncmoe.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "bench", "gpu"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "GPU 0" in done.stderr
