"""The table of transports; and docs/guides/transport.md, followed word for word: its file and its entry in a copy of the package."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncmoe.config import transports
from asyncmoe.config.transports import TRANSPORTS, TransportEntry, transport_for
from asyncmoe.errors import AsyncmoeError, ConfigError, ReportedFailure
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, Plan, plan
from asyncmoe.weights.protocol import EngineRanks, Terms
from asyncmoe.weights.receiver import channel, failing, hosting
from asyncmoe.weights.receiver.channel_end import opener
from asyncmoe.weights.receiver.control_store import Store
from tests.unit import doc_pages

FILE, TABLE = "asyncmoe/reshard/unix_transport.py", "in TRANSPORTS of asyncmoe/config/transports.py"
PAGE = doc_pages.read("guides/transport.md")
LIMIT_S = 60


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_entry_names_a_function_of_one_end(name: str) -> None:
    module, _, function = TRANSPORTS[name].opened_by.partition(":")
    (parameter,) = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    assert parameter.annotation in ("TransportEnd", "ChannelEnd")


def refusal(name: str, gpu: bool, together: bool, shared: bool) -> ConfigError | None:
    try:
        assert transport_for(name, gpu, together, shared) == name
    except ConfigError as error:
        return error
    return None


def test_auto_always_serves_and_each_is_refused_just_where_it_cannot() -> None:
    for gpu, together, shared in product((False, True), repeat=3):
        if gpu and shared and not together:
            continue  # refused whatever the transport
        assert transport_for("auto", gpu, together, shared) in TRANSPORTS
        for name, entry in TRANSPORTS.items():
            serves = entry.gpu == gpu and (together or not entry.one_host) and not (gpu and shared and entry.unshared)
            refused = refusal(name, gpu, together, shared)
            assert (refused is None) == serves
            if refused is not None:
                assert (refused.what, refused.got) == ("sync.transport", name)
                assert name not in re.split(" between | where ", str(refused.expected))[0].replace(",", "").split()


@pytest.mark.parametrize(("words", "said"), [(["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")])
def test_choices_in_words(words: list[str], said: str) -> None:
    assert transports.either(words) == said


def test_an_entry_that_cannot_be_imported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_transport.py").write_text("raise RuntimeError('imported')\n")
    for opened_by, said in (("my_transport:open_mine", "RuntimeError: imported"), ("no_such_module:f", "No module named 'no_such_module'")):
        monkeypatch.setitem(TRANSPORTS, "mine", TransportEntry("nothing", opened_by, gpu=False))
        with pytest.raises(ConfigError, match=rf"^sync\.transport: got mine, whose opened_by in .* is {opened_by}: .*{said}"):
            opener("mine")


OPENERS = """
def raises(end):
    raise OSError("no device of mine")

def nothing(end): ...
"""


def test_what_opening_raised_is_said_once_with_one_place_and_its_traceback_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bad_opener.py").write_text(OPENERS)
    place = rf"\(trainer rank 0 on {re.escape(socket.gethostname())}, cpu\)"
    for function, said, logged in (
        ("raises", f"OSError: no device of mine {place}", 'bad_opener.py", line 3, in raises'),
        ("nothing", f"sync.transport: got None from bad_opener:nothing, expected a Transport or SharedTransport .* {place}", ""),
    ):
        monkeypatch.setitem(TRANSPORTS, "mine", TransportEntry("nothing", f"bad_opener:{function}", gpu=False))
        terms, stores = meeting("mine")

        def failure(rank: int, terms: Terms = terms, stores: list[Store] = stores) -> Exception:
            with pytest.raises(ReportedFailure) as caught:
                channel.connect(stores[rank], terms, one_to_two(), 1)
            return caught.value

        with ThreadPoolExecutor(3) as threads:
            for rank, error in enumerate(threads.map(failure, range(3))):
                again = failing.said(error, terms, rank, torch.device("cpu"))  # as a rank reports it that met it
                assert re.fullmatch(said, again), again
        assert logged in caplog.text
        caplog.clear()


def meeting(transport: str) -> tuple[Terms, list[Store]]:
    """The terms and stores of a trainer rank and two engine ranks in this process."""
    engines = (EngineRanks("A", 2, 1, 1),)
    terms = Terms({}, None, {}, engines, "float32", "float32", transport, secrets.token_hex(8), 1 << 8, 10.0)
    hosted = hosting.host("loopback")
    where = hosting.place(hosted)
    stores = [Store("test", 0, *where, 5.0, hosted), *(Store("test", rank, *where, 5.0) for rank in (1, 2))]
    return terms, stores


# ---------------------------------------------------------------- the guide


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that imports the package with the changes of the guide, and everything else as it is."""
    root = tmp_path_factory.mktemp("changed")
    files = doc_pages.files(PAGE)
    package = root / "asyncmoe"
    for folder, kept in ((package, {"reshard", "config"}), (package / "reshard", set()), (package / "config", {"transports.py"})):
        folder.mkdir()
        for path in (doc_pages.ROOT / folder.relative_to(root)).iterdir():
            if path.name not in kept:
                (folder / path.name).symlink_to(path)
    (root / FILE).write_text(files[FILE])
    before, start, rest = (doc_pages.ROOT / "asyncmoe/config/transports.py").read_text().partition("TRANSPORTS: dict")
    table, end, after = rest.partition("\n}\n")
    entry = files[TABLE].partition("\n")[2].rstrip("\n")
    (root / "asyncmoe/config/transports.py").write_text(f"{before}{start}{table}\n{entry}{end}{after}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(doc_pages.ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}


def start(environment: dict[str, str], code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert err == ""
    return process.returncode, out


FOLLOWS = """
import runpy, sys
from pathlib import Path
from asyncmoe import config
from asyncmoe.config.transports import transport_for
from asyncmoe.doctor import built
from asyncmoe.errors import ConfigError
from tests.unit.doctor_machines import LAPTOP

assert not {"torch", "asyncmoe.weights.receiver", "asyncmoe.reshard"} & sys.modules.keys()
made = config.load(Path(sys.argv[1]) / "examples/demo.yaml", ["sync.transport=unix"])
assert transport_for(made.sync.transport, gpu=False) == "unix"
assert transport_for("auto", gpu=False) == "shm"
for where in ({"gpu": True}, {"gpu": False, "together": False}):
    try:
        transport_for("unix", **where)
    except ConfigError as error:
        print(error)
print(built.nccl(LAPTOP).found)
pages = runpy.run_path(str(Path(sys.argv[1]) / "docs/generate.py"))
print(next(line for line in pages["generate"]().splitlines() if line.startswith("| `sync.transport`")))
"""


def test_choices_refusals_doctor_and_reference_follow_from_the_entry(changed: dict[str, str]) -> None:
    code, out = ended(start(changed, FOLLOWS, str(doc_pages.ROOT)))
    assert code == 0
    refused, apart, doctor, reference = out.splitlines()
    assert doc_pages.blocks(PAGE, "output")[0].text == f"{refused}\n"
    assert re.match("sync.transport: got unix, expected auto, .* between several machines; ", apart)
    assert {"gloo", "nccl"} <= set(re.findall(r"\w+", apart))
    assert not {"shm", "ipc"} & set(re.findall(r"\w+", apart))
    assert doctor.startswith("no GPU; weights go over ")
    assert {"shm", "gloo", "unix"} <= set(re.findall(r"\w+", doctor))
    assert not {"nccl", "ipc"} & set(re.findall(r"\w+", doctor))
    assert ", ".join(f"`{name}`" for name in (*TRANSPORTS, "unix")) in reference
    assert "shm (shared memory of one host), gloo (TCP)" in reference
    assert "unix (Unix sockets of one host)" in reference


RANK = """
import os, signal, sys, time
import numpy as np
from asyncmoe.errors import AsyncmoeError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, plan
from asyncmoe.reshard.transport import TransportEnd
from asyncmoe.reshard.unix_transport import UnixTransport, open_unix

WORLD, ROWS, COLUMNS = 3, 1200, 900
rank, session, fate = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def striped(rank, by_column):
    size = COLUMNS // WORLD if by_column else ROWS // WORLD
    box = Box((0, size * rank), (ROWS, size)) if by_column else Box((size * rank, 0), (size, COLUMNS))
    builder = LayoutBuilder(rank, "int32")
    builder.stack("w", [("w", box)])
    return builder.build()


class Fated(UnixTransport):
    def exchange(self, sends, receives, timeout_s):
        if self.rank == 0 and ready:
            os.kill(os.getpid(), getattr(signal, fate))
        super().exchange(sends, receives, timeout_s)


ready = False
made = plan({"w": (ROWS, COLUMNS)}, [striped(r, False) for r in range(WORLD)], [striped(r, True) for r in range(WORLD)])
values = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
got = {"w": np.zeros((ROWS, COLUMNS // WORLD), np.int32)}
transport = open_unix(TransportEnd(rank=rank, world=WORLD, session=session, timeout_s=20.0))
transport.__class__ = Fated
with Exchanger(made, transport, bucket_bytes=200_000, timeout_s=20.0, threads=1) as exchanger:
    for number in range(1, 4):
        exchanger.bind({"w": number * values[ROWS // WORLD * rank : ROWS // WORLD * (rank + 1)]}, got)
        exchanger.run()
        assert (got["w"] == number * values[:, COLUMNS // WORLD * rank : COLUMNS // WORLD * (rank + 1)]).all()
    print("exact", flush=True)
    ready = bool(fate)
    exchanger._timeout_s = 1.0 if fate == "SIGSTOP" else 20.0
    began = time.monotonic()
    try:
        exchanger.run()
    except AsyncmoeError as error:
        assert time.monotonic() - began < 10
        print(error)
"""


def fates(environment: dict[str, str], fate: str) -> Iterator[str]:
    """Play three ranks, of which rank 0 may end; what each of the other two said after its bytes were exact."""
    session = f"test-{secrets.token_hex(6)}"
    ranks = [start(environment, RANK, str(rank), session, fate) for rank in range(3)]
    try:
        for process in ranks[1:]:
            code, out = ended(process)
            first, _, rest = out.partition("\n")
            assert (code, first) == (0, "exact")
            yield rest.strip()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        for path in Path("/dev/shm").glob(f"*{session}*"):
            assert fate
            path.unlink()


@pytest.mark.parametrize(("fate", "said"), [("", ""), ("SIGKILL", "rank 0 is gone"), ("SIGSTOP", "s for rank 0: its part of an exchange")])
def test_the_example_brings_every_byte_and_misses_a_peer(changed: dict[str, str], fate: str, said: str) -> None:
    """Whoever notices first says so; the other may miss the first."""
    errors = list(fates(changed, fate))
    assert fate or errors == ["", ""]
    assert any(said in error for error in errors)
    assert all(said in error or "is gone" in error for error in errors)


# ---------------------------------------------------------------- a channel of a real meeting


def one_to_two() -> Plan:
    whole, halves = LayoutBuilder(0, "int32"), []
    whole.place("w", (8, 16), [("w", Box((0, 0), (8, 16)), (0, 0))])
    for rank in (1, 2):
        builder = LayoutBuilder(rank, "int32")
        builder.place("w", (4, 16), [("w", Box((4 * rank - 4, 0), (4, 16)), (0, 0))])
        halves.append(builder.build())
    return plan({"w": (8, 16)}, [whole.build()], halves)


def test_a_channel_opens_what_the_terms_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unix_transport.py").write_text(doc_pages.files(PAGE)[FILE])
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = eval("{" + doc_pages.files(PAGE)[TABLE] + "}", {"TransportEntry": TransportEntry})["unix"]
    monkeypatch.setitem(TRANSPORTS, "unix", replace(entry, opened_by="unix_transport:open_unix"))
    terms, stores = meeting("unix")
    values = np.arange(128, dtype=np.int32).reshape(8, 16)
    got = {rank: {"w": np.zeros((4, 16), np.int32)} for rank in (1, 2)}

    def connected(rank: int) -> Exchanger:
        exchanger = channel.connect(stores[rank], terms, one_to_two(), 1)
        exchanger.bind({"w": values} if rank == 0 else None, got.get(rank))
        return exchanger

    def failure(exchanger: Exchanger) -> str:
        try:
            exchanger.run(10.0)
        except AsyncmoeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        exchangers = list(threads.map(connected, range(3)))
        assert list(threads.map(failure, exchangers)) == ["", "", ""]
        np.testing.assert_array_equal(np.concatenate([got[1]["w"], got[2]["w"]]), values)
        exchangers[0].close()
        assert all("rank 0 is gone" in error for error in threads.map(failure, exchangers[1:]))
    for exchanger in exchangers[1:]:
        exchanger.close()
    sys.modules.pop("unix_transport")
    assert not list(Path("/dev/shm").glob(f"*{terms.session}*"))
