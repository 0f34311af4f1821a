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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import asyncmoe.reshard._C as _C
from asyncmoe.errors import AsyncmoeError, UserError
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
_MAX_CTAS = 8
"""As `sync.nccl_max_ctas` by default."""

Told = dict[str, Any]
"""What a rank says: "facts" (`peers.Facts`), "rate" (GB/s of the second time that all messages were exchanged), "wrong" (messages with
other bytes than were sent), "error" ("TransferError: ...") and "seconds" until it."""


def main() -> None:
    result, figures, card = Path(sys.argv[1]), dict[str, tuple[Any, str]](), _C.cuda_device_count() > 0
    apart = _pair("1", "0")
    figures["refusal"] = (_refusal(*apart), "")
    if not card:
        write_outcome(result, figures, "no GPU here: only the refusal of settings that differ was tried")
        return
    figures |= {"nccl_here": (origin().words, ""), "unrefused": ("; ".join(told.get("error", "no error") for told in apart), "")}
    for setting in ("1", "0"):
        write_outcome(result, figures)
        sender, receiver = _pair(setting, setting, kill=setting == "0")
        figures[f"rate_cumem_{setting}"] = (receiver.get("rate"), "GB/s")
        if "error" in receiver or receiver.get("wrong", MESSAGES):
            sys.exit(f"{SETTING}={setting} twice: got {receiver}, expected {MESSAGES} messages as sent; the sender: {sender}")
    figures |= {"killed_error": (sender.get("error"), ""), "killed_seconds": (sender.get("seconds"), "s until the other rank ended")}
    write_outcome(result, figures)
    if sender.get("seconds", 2 * _PAIR_S) > 2 * TIMEOUT_S:
        sys.exit(f"the peer of a killed process: got {sender}, expected an error within {2 * TIMEOUT_S:g} s")


def _refusal(*told: Told) -> str:
    """The line with which a run refuses one of two processes."""
    ours, theirs = (msgspec.convert(one["facts"], peers.Facts) for one in told)
    try:
        peers.check(ours, theirs)
    except UserError as error:
        return str(error)
    sys.exit(f"processes with {ours.nccl} and {theirs.nccl}: got no refusal, expected one line")


def _pair(*settings: str, kill: bool = False) -> list[Told]:
    """What two ranks say of which each has its setting; rank 1 kills itself in the end if `kill`."""
    unique_id = make_unique_id().hex() if _C.cuda_device_count() else ""
    with tempfile.TemporaryDirectory() as folder:
        files, started = [Path(folder, str(rank)) for rank in range(len(settings))], []
        for rank, setting in enumerate(settings):
            environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN", SETTING: setting}
            code = f"from tests.gpu.bundle import two_processes as m; m.play({rank}, {str(files[rank])!r}, {unique_id!r}, {kill})"
            started.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
        until = time.monotonic() + _PAIR_S
        while any(process.poll() is None for process in started) and time.monotonic() < until:
            time.sleep(0.05)
        ended = [{} if process.poll() is not None else {"error": f"still running after {_PAIR_S:g} s"} for process in started]
        for process in started:
            process.kill()
            process.wait()
        told = [json.loads(file.read_text()) if file.exists() else {"error": "it said nothing; see the log"} for file in files]
        return [one | late for one, late in zip(told, ended, strict=True)]


def play(rank: int, file: str, unique_id: str, kill: bool) -> None:
    """One of two ranks: exchange the messages, and write how it went."""
    told: Told = {"facts": msgspec.to_builtins(peers.facts(f"rank {rank}"))}

    def tell(**more: Any) -> None:
        told.update(more)
        Path(file).write_text(json.dumps(told))

    tell()
    began = time.monotonic()
    try:
        if unique_id:
            nccl = NcclTransport(rank, 2, bytes.fromhex(unique_id), 0, timeout_s=TIMEOUT_S, max_ctas=_MAX_CTAS)
            tell(**exchanged(nccl, rank))
            began = time.monotonic()
            if kill and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if kill:
                nccl.exchange([], [(1, nccl.empty(MESSAGE_BYTES))], TIMEOUT_S)
            nccl.end(True)
    except AsyncmoeError as error:
        tell(error=f"{type(error).__name__}: {error}", seconds=round(time.monotonic() - began, 1))


def exchanged(nccl: NcclTransport, rank: int) -> Told:
    """Send all messages to rank 1, or receive them, twice."""
    content = np.random.default_rng(1).integers(0, 256, MESSAGE_BYTES, np.uint8)
    buffers, got, wrong, seconds = [nccl.empty(MESSAGE_BYTES) for _ in range(MESSAGES)], np.empty_like(content), 0, 0.0
    for number, buffer in enumerate(buffers if rank == 0 else ()):
        content[:8] = number
        _move(buffer.address, content.ctypes.data)
    for _ in range(2):
        began = time.perf_counter()
        for buffer in buffers:
            nccl.exchange(*(([(1, buffer)], []) if rank == 0 else ([], [(0, buffer)])), TIMEOUT_S)
        seconds = time.perf_counter() - began
    for number, buffer in enumerate(buffers):
        content[:8] = number
        _move(got.ctypes.data, buffer.address)
        wrong += not np.array_equal(got, content)
    return {"rate": round(MESSAGES * MESSAGE_BYTES / seconds / 1e9, 1), "wrong": wrong}


def _move(destination: int, source: int) -> None:
    """Copy a message between host and card, and wait for it."""
    _C.copy_plainly(0, destination, source, MESSAGE_BYTES, 0)
    event = _C.DeviceEvent(0)
    event.record(0)
    event.wait(TIMEOUT_S)


if __name__ == "__main__":
    main()
