"""NCCL between two processes on one card: `python -m tests.gpu.bundle.two_processes RESULT`.

NCCL 2.30 lets ranks share a card if NCCL_MULTI_RANK_GPU_ENABLE is set. Processes whose settings of NCCL differ are refused as those of a
run are (`asyncmoe.rpc.peers`), and then let through, to see what the refusal saves from. Processes whose settings agree exchange messages;
at last one of them is killed. Without a GPU only the refusal is tried. Nothing here imports torch, which would load an NCCL of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.reshard.memory import DeviceBuffer
from asyncmoe.reshard.nccl import make_unique_id, origin
from asyncmoe.reshard.nccl_transport import NcclTransport
from asyncmoe.rpc import peers
from tests.gpu.bundle.summary import write_outcome

SETTING = "NCCL_CUMEM_ENABLE"
"""1 by NCCL's own default; 0 in SGLang, and so in asyncmoe."""
MESSAGES, MESSAGE_BYTES = 8, 256 << 20
"""2 GiB from rank 0 to rank 1."""
TIMEOUT_S = 8.0
_PAIR_S = 25.0
_POLL_S = 0.02
_MAX_CTAS = 8
"""As `sync.nccl_max_ctas` by default."""


@dataclass(frozen=True)
class Told:
    """How a rank fared.

    Attributes:
        error: "TransferError: ..." where an exchange failed.
        seconds: until that error.
        rate: GB/s of the second time that all messages were exchanged.
        wrong: messages that arrived with other bytes than were sent.
    """

    error: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    wrong: int = 0


def main() -> None:
    result, figures = Path(sys.argv[1]), dict[str, tuple[Any, str]]()
    with tempfile.TemporaryDirectory() as folder:
        apart = _pair(Path(folder, "apart"), "1", "0")
        figures["refusal"] = (_refusal(Path(folder, "apart")), "")
        if _C.cuda_device_count() == 0:
            write_outcome(result, figures, "no GPU here: only the refusal of settings that differ was tried")
            return
        found = origin()
        figures |= {"nccl_here": (found.words, ""), "unrefused": ("; ".join(one.error or "no error" for one in apart), "")}
        write_outcome(result, figures)
        for setting in ("1", "0"):
            sender, receiver = _pair(Path(folder, setting), setting, setting, kill=setting == "0")
            figures[f"rate_cumem_{setting}"] = (round(receiver.rate, 1), "GB/s")
            write_outcome(result, figures)
            if receiver.error or receiver.wrong or not receiver.rate:
                sys.exit(
                    f"{SETTING}={setting} in both processes: got {receiver}, expected {MESSAGES} messages as sent; the sender: {sender}"
                )
    figures |= {"killed_error": (sender.error, ""), "killed_seconds": (round(sender.seconds, 1), "s until the other rank ended")}
    write_outcome(result, figures)
    if not sender.error.startswith(("TransferError", "WaitTimeout")) or sender.seconds > 2 * TIMEOUT_S:
        sys.exit(f"the peer of a killed process: got {sender}, expected an error that names it within {2 * TIMEOUT_S:g} s")


def _refusal(folder: Path) -> str:
    """The line with which a run refuses the processes of a folder."""
    ours, theirs = (msgspec.json.decode((folder / f"facts-{rank}").read_bytes(), type=peers.Facts) for rank in (0, 1))
    try:
        peers.check(ours, theirs)
    except UserError as error:
        return str(error)
    sys.exit(f"processes with {ours.nccl} and {theirs.nccl}: got no refusal, expected one line")


def _pair(folder: Path, *settings: str, kill: bool = False) -> list[Told]:
    """What two ranks say of which each has its setting; rank 1 kills itself in the end if `kill`."""
    folder.mkdir()
    started = []
    for rank, setting in enumerate(settings):
        environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN", SETTING: setting}
        code = f"from tests.gpu.bundle import two_processes as m; m.play({rank}, {str(folder)!r}, {kill})"
        started.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
    until = time.monotonic() + _PAIR_S
    for process in started:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    files = [folder / f"told-{rank}" for rank in range(len(settings))]
    return [Told(**json.loads(file.read_text())) if file.exists() else Told(error="it said nothing; see the log") for file in files]


def play(rank: int, folder: str, kill: bool) -> None:
    """One of two ranks: write this process's facts, exchange the messages twice, and say how it went."""
    (Path(folder) / f"facts-{rank}").write_bytes(msgspec.json.encode(peers.facts(f"rank {rank}")))
    if _C.cuda_device_count() == 0:
        return
    said, began = Path(folder) / f"told-{rank}", time.monotonic()
    try:
        nccl = NcclTransport(rank, 2, _unique_id(rank, Path(folder)), 0, timeout_s=TIMEOUT_S, max_ctas=_MAX_CTAS)
        told = exchanged(nccl, 1 - rank)
        if kill:
            said.write_text(json.dumps(asdict(told)))
            began = time.monotonic()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            message = nccl.empty(MESSAGE_BYTES)
            nccl.exchange([], [(1, message)], TIMEOUT_S)
        nccl.end(True)
    except AsyncmoeError as error:
        told = Told(f"{type(error).__name__}: {error}", time.monotonic() - began)
    said.write_text(json.dumps(asdict(told)))


def exchanged(nccl: NcclTransport, peer: int) -> Told:
    """Send all messages to rank 1, or receive them, twice."""
    buffers = [nccl.empty(MESSAGE_BYTES) for _ in range(MESSAGES)]
    content = np.random.default_rng(1).integers(0, 256, MESSAGE_BYTES, np.uint8)
    for number, buffer in enumerate(buffers):
        content[:8] = number
        if peer == 1:
            _copy(buffer.address, content)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for buffer in buffers:
            nccl.exchange(*(([(peer, buffer)], []) if peer == 1 else ([], [(peer, buffer)])), TIMEOUT_S)
        seconds = time.perf_counter() - began
    wrong = 0 if peer == 1 else sum(not _holds(buffer, content, number) for number, buffer in enumerate(buffers))
    return Told(rate=MESSAGES * MESSAGE_BYTES / seconds / 1e9, wrong=wrong)


def _holds(buffer: DeviceBuffer, content: np.ndarray, number: int) -> bool:
    content[:8] = number
    got = np.empty_like(content)
    _C.copy_plainly(0, got.ctypes.data, buffer.address, got.nbytes, 0)
    _finish()
    return np.array_equal(got, content)


def _copy(address: int, content: np.ndarray) -> None:
    _C.copy_plainly(0, address, content.ctypes.data, content.nbytes, 0)
    _finish()


def _finish() -> None:
    event = _C.DeviceEvent(0)
    event.record(0)
    event.wait(TIMEOUT_S)


def _unique_id(rank: int, folder: Path) -> bytes:
    """NCCL's ID of the communicator, which rank 0 makes and rank 1 waits for."""
    file = folder / "id"
    if rank == 0:
        file.with_suffix(".part").write_bytes(made := make_unique_id())
        file.with_suffix(".part").replace(file)
        return made
    until = time.monotonic() + TIMEOUT_S
    while not file.exists() and time.monotonic() < until:
        time.sleep(_POLL_S)
    return file.read_bytes()


if __name__ == "__main__":
    main()
