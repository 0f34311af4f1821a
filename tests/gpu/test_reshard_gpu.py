"""The copy kernel and the transports between GPUs, on a GPU. Needs an extension built with CUDA, and torch."""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path += [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parents[1] / "native")]

from reshard_ranks import Stripes, blank  # noqa: E402
from test_reshard_copy import check_box  # noqa: E402
from test_reshard_delta_cuda_emulated import message_of  # noqa: E402
from test_reshard_program import casts, message_rows, rounded, swapped  # noqa: E402

import asyncmoe.reshard._C as _C  # noqa: E402
from asyncmoe.errors import TransferError  # noqa: E402
from asyncmoe.reshard import Exchanger, digest  # noqa: E402
from asyncmoe.reshard.ipc_transport import IpcTransport  # noqa: E402

if _C.cuda_device_count() == 0 or not torch.cuda.is_available():
    pytest.skip("no GPU, or no CUDA kernels built", allow_module_level=True)

POISON = 0xAA
SEAL = 0x123456789ABCDEF


def gpu(array: np.ndarray) -> Any:
    return torch.from_numpy(array.copy()).cuda()


def poisoned(nbytes: int) -> Any:
    return torch.full((nbytes,), POISON, dtype=torch.uint8, device="cuda")


def at(*tensors: Any) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], np.int64)


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def fresh(nbytes: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, nbytes, np.uint8)


def on_gpu(rows: np.ndarray, source: np.ndarray, destination: np.ndarray) -> None:
    there, back = gpu(source), gpu(destination)
    program = _C.Program(rows, np.array([0, len(rows)], np.int64), "none")
    _C.DeviceProgram(program, 0).run(0, at(there), at(back), 0, stream())
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


MESSAGES = [
    ([(0, (1, 1, 1, 5_000_003))], 1),
    ([(1, (3, 5, 63, 127)), (0, (1, 1, 1, 5)), (2, (4, 4, 40, 8))], 1),
    ([(1, (1, 7, 300, 768)), (0, (1, 1, 1, 2048)), (16, (1, 1, 128, 2048))], 2),
    ([(0, (1, 1, 1, n)) for n in range(1, 400)], 2),
    ([(8, (1, 1, 512, 4096))], 2),
    ([(0, (1, 1, 1, 3 * 32768 + 8192 + 48)), (0, (1, 1, 1, 5)), (0, (1, 1, 1, 100_003)), (0, (1, 1, 1, 1 << 20))], 1),
]


@pytest.mark.parametrize(("boxes", "item"), MESSAGES)
def test_messages_and_their_digests_are_the_cpus(boxes: list[Any], item: int) -> None:
    """Three times over, so that what one launch leaves behind would spoil the next."""
    rows, held = message_rows(boxes, item)
    firsts = np.array([0, len(rows)], np.int64)
    programs = [_C.Program(rows, firsts, "destination"), _C.Program(swapped(rows), firsts, "source")]
    packing, unpacking = (_C.DeviceProgram(program, 0) for program in programs)
    nbytes = programs[0].bytes(0)
    trailer = -(-nbytes // 8) * 8
    for _ in range(3):
        source, expected = fresh(held), np.full(trailer + 16, POISON, np.uint8)
        value = programs[0].run(0, np.array([source.ctypes.data]), np.array([expected.ctypes.data]), 2)
        assert value == digest(expected[:nbytes].copy())
        expected[trailer : trailer + 8] = np.array([value ^ SEAL], np.uint64).view(np.uint8)
        there, message = gpu(source), poisoned(trailer + 16)
        packing.run(0, at(there), at(message), SEAL, stream())
        np.testing.assert_array_equal(message.cpu().numpy(), expected)
        back, wanted = poisoned(held), np.full(held, POISON, np.uint8)
        unpacking.run(0, at(message), at(back), SEAL, stream())
        programs[1].run(0, np.array([expected.ctypes.data]), np.array([wanted.ctypes.data]), 2)
        np.testing.assert_array_equal(back.cpu().numpy(), wanted)
        assert unpacking.take_mismatch() == -1
        for place in (0, nbytes - 1, trailer + 7):
            message[place] ^= 1
            unpacking.run(0, at(message), at(back), SEAL, stream())
            message[place] ^= 1
            torch.cuda.synchronize()
            assert unpacking.take_mismatch() == 0
        unpacking.run(0, at(message), at(back), SEAL + 1, stream())
        torch.cuda.synchronize()
        assert unpacking.take_mismatch() == 0
        assert unpacking.take_mismatch() == -1


@pytest.mark.parametrize("run", [32, 384, 4096, 40_000, 524_304])
def test_rows_in_even_tiles(run: int) -> None:
    """Rows 1152 bytes apart: no unit is looked up, and the message is the CPU's."""
    height = 300_000 // run + 3
    rows = np.array([[0, 0, 0, 0, 1, 1, 1, height, run, 0, 0, run + 1152, 1, 0, 0, run, 1]], np.int64)
    program = _C.Program(rows, np.array([0, 1], np.int64), "destination")
    source, expected = fresh(height * (run + 1152)), np.empty(height * run, np.uint8)
    value = program.run(0, np.array([source.ctypes.data]), np.array([expected.ctypes.data]), 2)
    there, message = gpu(source), poisoned(height * run + 16)
    assert "uneven" not in {way for way, _ in _C.ways_on_cuda(program, 0, at(there), at(message))}
    _C.DeviceProgram(program, 0).run(0, at(there), at(message), SEAL, stream())
    got = message.cpu().numpy()
    np.testing.assert_array_equal(got[: height * run], expected)
    assert int(got[height * run :][:8].view(np.uint64)[0]) == value ^ SEAL


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_messages_anywhere_in_memory(shift: int) -> None:
    rows, held = message_rows([(1, (2, 3, 5, 77)), (0, (1, 1, 1, 4096))], 2)
    program = _C.Program(rows, np.array([0, 2], np.int64), "destination")
    source, message = fresh(held), poisoned(program.bytes(0) + 64)
    expected = np.empty(program.bytes(0), np.uint8)
    program.run(0, np.array([source.ctypes.data]), np.array([expected.ctypes.data]), 1)
    _C.DeviceProgram(program, 0).run(0, at(gpu(source)), at(message) + 16 + shift, 0, stream())
    got = message.cpu().numpy()
    np.testing.assert_array_equal(got[16 + shift : 16 + shift + len(expected)], expected)
    assert (got[: 16 + shift] == POISON).all()


def test_casts_round_as_torch_does() -> None:
    bits = np.random.default_rng().integers(0, 1 << 32, 1 << 20, np.uint32)
    ties = np.concatenate([(np.arange(1 << 16, dtype=np.uint32) << 16) | low for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = np.concatenate([bits, ties]).view(np.float32)
    row = np.array([[0, 0, 0, 0, 4, 1, 1, 1, len(values), 0, 0, 0, 4, 0, 0, 0, 2]], np.int64)
    program = _C.Program(row, np.array([0, 1], np.int64), "none", casts(1))
    back = poisoned(2 * len(values))
    _C.DeviceProgram(program, 0).run(0, at(gpu(values.view(np.uint8))), at(back), 0, stream())
    got, number = back.cpu().numpy().view(np.uint16), ~np.isnan(values)
    np.testing.assert_array_equal(got[number], rounded(values)[number])
    assert np.isnan((got[~number].astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.skipif(torch.cuda.mem_get_info()[0] < 24 << 30, reason="less than 24 GiB free on the GPU")
def test_a_box_of_more_than_4_gib() -> None:
    rows_, columns, gap = 70_000, 65_536, 64
    row = np.array([[0, 0, 0, 0, 1, 1, 1, rows_, columns, 0, 0, columns + gap, 1, 0, 0, columns, 1]], np.int64)
    program = _C.Program(row, np.array([0, 1], np.int64), "none")
    source = torch.randint(0, 256, (rows_, columns + gap), dtype=torch.uint8, device="cuda")
    got = poisoned(rows_ * columns)
    _C.DeviceProgram(program, 0).run(0, at(source), at(got), 0, stream())
    assert torch.equal(got.view(rows_, columns), source[:, :columns])


# ---------------------------------------------------------------- transports

WORLD = 2
STRIPES = Stripes(WORLD, (1200, 900))


def _through_ipc(rank: int, session: str, into: str, damage: bool) -> None:
    mine, got = ({name: gpu(array) for name, array in side.items()} for side in (STRIPES.sent(rank), blank(STRIPES.destination[rank])))
    with Exchanger(STRIPES.plan, IpcTransport(rank, session, 0), bucket_bytes=200_000, timeout_s=60) as exchanger:
        exchanger.bind(mine, got)
        if damage and rank == 0:
            exchanger._runs = 5  # what it sends is sealed as if of another run
        try:
            for number in range(4):
                for name, array in STRIPES.sent(rank, number).items():
                    mine[name].copy_(torch.from_numpy(array))
                torch.cuda.synchronize()
                exchanger.run()
                STRIPES.check(rank, {name: one.cpu().numpy() for name, one in got.items()}, number)
        except TransferError as error:
            Path(into, str(rank)).write_text(str(error))
            return
    Path(into, str(rank)).write_text("done")


def play(target: Callable[..., None], *arguments: Any) -> list[str]:
    into = Path(arguments[-2])
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, *arguments)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(180)
        if process.is_alive():
            process.kill()
    return [path.read_text() if (path := into / str(rank)).exists() else "no result" for rank in range(WORLD)]


def test_cuda_ipc_between_two_processes(tmp_path: Path) -> None:
    session = f"test-{secrets.token_hex(6)}"
    assert play(_through_ipc, session, str(tmp_path), False) == ["done", "done"]
    assert [path for path in Path("/dev/shm").iterdir() if session in path.name] == []


def test_a_damaged_message_is_refused_by_the_gpu(tmp_path: Path) -> None:
    results = play(_through_ipc, f"test-{secrets.token_hex(6)}", str(tmp_path), True)
    assert any("from rank 0 to rank 1: message 1 of" in result and "another digest" in result for result in results)


def _check_kernels() -> None:
    """What compute-sanitizer watches: exact allocations without a caching allocator between."""
    for boxes, item in MESSAGES[1:4]:
        rows, held = message_rows(boxes, item)
        firsts = np.array([0, len(rows)], np.int64)
        programs = [_C.Program(rows, firsts, "destination"), _C.Program(swapped(rows), firsts, "source")]
        nbytes = -(-programs[0].bytes(0) // 8) * 8 + 8
        source, message, back = (_C.DeviceMemory(0, n) for n in (held, nbytes, held))
        end = _C.DeviceEvent(0)
        where = [np.array([memory.address], np.int64) for memory in (source, message, back)]
        held_programs = [_C.DeviceProgram(program, 0) for program in programs]
        held_programs[0].run(0, where[0], where[1], SEAL, 0)
        held_programs[1].run(0, where[1], where[2], SEAL, 0)
        end.record(0)
        assert end.wait(120)
        assert held_programs[1].take_mismatch() == -1
    _check_deltas()


def _check_deltas() -> None:
    """All kernels of deltas, over blocks of mixed items: few changes, many, and too many to code."""
    message = message_of([(2, (1, 65536), 0), (1, (3, 333), 1), (8, (2, 77), 0), (4, (40, 500), 3)])
    held, now, old, payload = (_C.DeviceMemory(0, n + 16) for n in (message.held, message.nbytes, message.nbytes, message.table.bound(0)))
    table, end = _C.DeviceDelta(message.table, 0), _C.DeviceEvent(0)
    pack, places = _C.DeviceProgram(message.pack, 0), np.array([held.address], np.int64)
    before = fresh(message.held)

    def put(values: np.ndarray, packed: Any) -> None:
        _C.copy_plainly(0, held.address, values.ctypes.data, values.nbytes, 0)
        pack.run(0, places, np.array([packed.address], np.int64), 0, 0)

    for share in (0.001, 0.1, 1.0):
        after = np.where(fresh(len(before)) < 256 * share, before ^ 1, before)
        put(after, now)
        put(before, old)
        table.encode(0, now.address, old.address, payload.address, 0)
        end.record(0)
        assert end.wait(120)
        nbytes, difference, *_ = table.take()
        for write in (False, True):
            table.apply(0, payload.address, nbytes, places, write, 0)
            end.record(0)
            assert end.wait(120)
            assert table.take()[1] == difference
        table.read(0, places, 0, 0)
        end.record(0)
        assert end.wait(120)
        assert table.take()[1] == message.table.read(0, np.array([after.ctypes.data], np.int64))


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


if __name__ == "__main__":
    _check_kernels()
