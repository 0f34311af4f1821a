"""NCCL's transport against a stand-in of the library: the order of calls, and every way it can fail."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from fake_nccl import built
from reshard_gpu_fakes import FakeGpu, bytes_of

import asyncmoe.reshard._C as _C
from asyncmoe.errors import InvariantBroken, TransferError, UserError, WaitTimeout
from asyncmoe.process import wait_until
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, Transport, plan
from asyncmoe.reshard.nccl import Origin, make_unique_id, origin
from asyncmoe.reshard.nccl_transport import NcclTransport

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stand-in with")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh copy for every test: what is loaded once keeps its state."""
    monkeypatch.setenv("FAKE_NCCL_LOG", str(tmp_path / "log"))
    return built(tmp_path / "libnccl.so.2")


def calls(library: str) -> list[str]:
    return Path(library).with_name("log").read_text().splitlines()


def transport(library: str, world: int = 1, timeout_s: float = 5.0) -> NcclTransport:
    return NcclTransport(0, world, make_unique_id(library), 0, timeout_s=timeout_s, library=library, gpu=FakeGpu())


def test_an_exchange_is_one_group(library: str) -> None:
    nccl = transport(library, 3)
    assert isinstance(nccl, Transport)
    buffers = [nccl.empty(nbytes) for nbytes in (40, 24, 40, 24)]
    for number, buffer in enumerate(buffers):
        bytes_of(buffer)[:] = number
    nccl.exchange([(0, buffers[0]), (2, buffers[1])], [(0, buffers[2]), (1, buffers[3])], 5)
    assert [bytes_of(b)[0] for b in buffers] == [0, 1, 0, 1]
    nccl.exchange([], [], 5)
    nccl.end(True)
    expected = ["init 3 0", "start", "recv 0 40", "recv 1 24", "send 0 40", "send 2 24", "end", "destroy"]
    assert [line for line in calls(library) if line != "id"] == expected


def test_peers_that_do_not_join(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_INIT", "7")
    with pytest.raises(WaitTimeout, match="ranks 1, 2: to join"):
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
    nccl.end(True)
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
    said = rf"from rank 0 to rank 1.*invalid usage.*on cpu of {socket.gethostname()}, exchanging with ranks 1"
    with pytest.raises(TransferError, match=said):
        nccl.exchange([(1, nccl.empty(8))], [(1, nccl.empty(8))], 5)
    assert calls(library)[-2:] == (["end", "abort"] if failing != "start" else ["start", "abort"])


def test_a_refused_communicator(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_FAIL", "init")
    with pytest.raises(TransferError, match="ncclCommInitRankConfig: invalid usage"):
        transport(library, 2)


def test_no_library(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "none.so", "cannot open shared object"), (Path(_C.__file__), "a library without ncclGetVersion")):
        with pytest.raises(UserError, match=f"{expected}.*expected NVIDIA's NCCL 2.14 or later; install"):
            make_unique_id(str(path))
        with pytest.raises(UserError, match="install"):
            NcclTransport(0, 1, b"\0" * 128, 0, library=str(path), gpu=FakeGpu())


def test_the_unique_id_is_what_the_library_makes(library: str) -> None:
    first, second = make_unique_id(library), make_unique_id(library)
    assert first != second
    assert first[1:] == second[1:] == bytes([42]) * 127


@pytest.mark.parametrize(("code", "words"), [(23007, "2.30.7"), (21403, "2.14.3")])
def test_what_is_said_of_the_library(library: str, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(code))
    assert origin(library) == Origin(code, library)
    assert origin(library).words == words


@pytest.mark.parametrize(("version", "given", "logged"), [(23007, 8, ["ctas 8"]), (23007, 0, []), (21403, 8, [])])
def test_a_library_gets_the_settings_it_knows(
    library: str, monkeypatch: pytest.MonkeyPatch, version: int, given: int, logged: list[str]
) -> None:
    """The stand-in refuses a structure of another size, version or layout than its own version has."""
    monkeypatch.setenv("FAKE_NCCL_VERSION", str(version))
    NcclTransport(0, 1, make_unique_id(library), 0, max_ctas=given, library=library, gpu=FakeGpu()).end(True)
    assert [line for line in calls(library) if line.startswith("ctas")] == logged


def header() -> Path | None:
    """nccl.h of an installed wheel, or of the system."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    places = [*(spec.submodule_search_locations or [] if spec else []), os.environ.get("NCCL_HOME", ""), "/usr", "/usr/local/cuda"]
    return next((path for place in places if place and (path := Path(place, "include", "nccl.h")).exists()), None)


@pytest.mark.skipif(header() is None, reason="no nccl.h: neither an nvidia-nccl wheel nor NCCL_HOME is here")
def test_the_settings_lie_where_the_installed_header_says(tmp_path: Path) -> None:
    """Members of `Config` in csrc/nccl.cpp, and the numbers it gives to calls."""
    offsets = {"size": 0, "magic": 8, "version": 12, "blocking": 16, "cgaClusterSize": 20, "minCTAs": 24, "maxCTAs": 28, "netName": 32}
    checks = [f'_Static_assert(offsetof(ncclConfig_t, {name}) == {offset}, "{name}");' for name, offset in offsets.items()]
    values = {"NCCL_API_MAGIC": "0xcafebeef", "NCCL_CONFIG_UNDEF_INT": "INT_MIN", "ncclInProgress": 7, "ncclUint8": 1}
    checks += [f'_Static_assert({name} == {value}, "{name}");' for name, value in values.items()]
    stub = tmp_path / "cuda_runtime.h"
    stub.write_text("typedef struct CUstream_st* cudaStream_t; typedef struct CUgraph_st* cudaGraph_t;\n")
    (tmp_path / "cuda_fp16.h").write_text("")
    source = tmp_path / "layout.c"
    source.write_text("\n".join(["#include <limits.h>", "#include <stddef.h>", "#include <nccl.h>", *checks]))
    found = header()
    subprocess.run(["gcc", "-fsyntax-only", f"-I{tmp_path}", f"-I{found.parent}", str(source)], check=True, timeout=60)


def test_the_end_of_an_exchanger_ends_the_communicator(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By destroying it after runs that went well, by aborting it after one that did not: also while another thread waits in it."""
    builder = LayoutBuilder(0, "int32")
    builder.place("w", (4,), [("w", Box((0,), (4,)), (0,))])
    made = plan({"w": (4,)}, [builder.build()], [builder.build().at(1)])
    arrays = {"w": np.arange(4, dtype=np.int32)}
    well = Exchanger(made, transport(library, 2), timeout_s=0.2)
    well.bind(arrays)
    well.run()
    well.close()
    well.close()
    assert calls(library)[-1] == "destroy"
    assert calls(library).count("destroy") == 1
    monkeypatch.setenv("FAKE_NCCL_STATE", "7")
    failing = Exchanger(made, transport(library, 2), timeout_s=60)
    failing.bind(arrays)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(failing.run)
        assert wait_until(lambda: calls(library)[-1] == "end", 10)
        failing.close()
        with pytest.raises(TransferError, match="ended"):
            running.result(5)
    assert calls(library)[-1] == "abort"
    assert calls(library).count("abort") == 1
