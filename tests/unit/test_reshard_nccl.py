"""NCCL's transport against a stand-in of the library: the order of calls, and every way it can fail."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from reshard_gpu_fakes import FakeGpu, bytes_of

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, TransferError, UserError, WaitTimeout
from asyncmoe.reshard import Transport
from asyncmoe.reshard.nccl_transport import NcclTransport, make_unique_id
from asyncmoe.reshard.transport import Lane, MessageLink

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh copy for every test: what is loaded once keeps its state."""
    path = tmp_path / "libnccl.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(Path(__file__).with_name("fake_nccl.c"))], check=True, timeout=60)
    monkeypatch.setenv("FAKE_NCCL_LOG", str(tmp_path / "log"))
    return str(path)


def calls(library: str) -> list[str]:
    return Path(library).with_name("log").read_text().splitlines()


def transport(library: str, world: int = 1, timeout_s: float = 5.0) -> NcclTransport:
    return NcclTransport(0, world, make_unique_id(library), 0, timeout_s=timeout_s, library=library, gpu=FakeGpu())


def test_an_exchange_is_one_group(library: str) -> None:
    with transport(library, 3) as nccl:
        assert isinstance(nccl, Transport)
        buffers = [nccl.empty(nbytes) for nbytes in (40, 24, 40, 24)]
        for number, buffer in enumerate(buffers):
            bytes_of(buffer)[:] = number
        nccl.exchange([(0, buffers[0]), (2, buffers[1])], [(0, buffers[2]), (1, buffers[3])], 5)
        assert [bytes_of(b)[0] for b in buffers] == [0, 1, 0, 1]
        nccl.exchange([], [], 5)
    expected = ["version", "init 3 0", "start", "recv 0 40", "recv 1 24", "send 0 40", "send 2 24", "end", "destroy"]
    assert [line for line in calls(library) if line != "id"] == expected


def test_rounds_through_a_link(library: str) -> None:
    """As an exchange has them: a thread of its own waits, slices of buffers travel."""
    nccl = transport(library)
    lane = Lane(0, (24, 16), 24)
    link = MessageLink(nccl, [lane], [lane], 2, threaded=nccl.waits)
    for number in range(2):
        bytes_of(link.pack_into(0, number, 5))[:] = 10 + number
        link.close_round(number, 5)
    for number, nbytes in enumerate((24, 16)):
        np.testing.assert_array_equal(bytes_of(link.unpack_from(0, number, 5)), np.full(nbytes, 10 + number))
    link.finish(5)
    link.close()
    nccl.close()


def test_peers_that_do_not_join(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_INIT", "7")
    with pytest.raises(WaitTimeout, match="ranks 1, 2: it to join"):
        transport(library, 3, timeout_s=0.2)
    assert calls(library)[-1] == "abort"


@pytest.mark.parametrize(("state", "error", "match"), [("6", TransferError, "remote process exited"), ("7", WaitTimeout, "rank 1")])
def test_a_peer_that_is_lost(library: str, monkeypatch: pytest.MonkeyPatch, state: str, error: type[Exception], match: str) -> None:
    nccl = transport(library, 2)
    monkeypatch.setenv("FAKE_NCCL_STATE", state)
    with pytest.raises(error, match=match):
        nccl.exchange([(1, nccl.empty(8))], [], 0.2)
    assert calls(library)[-1] == "abort"
    with pytest.raises(InvariantBroken, match="make a new one"):
        nccl.exchange([(1, nccl.empty(8))], [], 0.2)
    nccl.close()
    assert calls(library).count("abort") == 1
    assert "destroy" not in calls(library)


def test_copies_that_never_end(library: str) -> None:
    nccl = transport(library, 2)
    nccl._after.looks = 1 << 60
    with pytest.raises(WaitTimeout, match="rank 1: its messages"):
        nccl.exchange([(1, nccl.empty(8))], [], 0.2)
    assert calls(library)[-1] == "abort"


@pytest.mark.parametrize("failing", ["send", "recv", "end", "start"])
def test_a_refused_call_ends_the_group_and_the_communicator(library: str, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    nccl = transport(library, 2)
    monkeypatch.setenv("FAKE_NCCL_FAIL", failing)
    with pytest.raises(TransferError, match=r"from rank 0 to rank 1.*invalid usage.*ranks 1"):
        nccl.exchange([(1, nccl.empty(8))], [(1, nccl.empty(8))], 5)
    assert calls(library)[-2:] == (["end", "abort"] if failing != "start" else ["start", "abort"])


def test_a_refused_communicator(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_FAIL", "init")
    with pytest.raises(TransferError, match="ncclCommInitRankConfig: invalid usage"):
        transport(library, 2)


def test_no_library(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "none.so", "cannot open shared object"), (Path(_C.__file__), "it has no ncclGetVersion")):
        with pytest.raises(UserError, match=f"{expected}.*expected NVIDIA's NCCL 2.14 or later; install"):
            make_unique_id(str(path))
        with pytest.raises(UserError, match="install"):
            NcclTransport(0, 1, b"\0" * 128, 0, library=str(path), gpu=FakeGpu())


def test_the_unique_id_is_what_the_library_makes(library: str) -> None:
    assert make_unique_id(library) == bytes([42]) * 128
    with pytest.raises(ValueError, match="128 bytes"):
        NcclTransport(0, 1, b"short", 0, library=library, gpu=FakeGpu())
