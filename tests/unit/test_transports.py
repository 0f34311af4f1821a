"""The table of transports; and the file and the entry of docs/guides/transport.md, used as they are written there."""

from __future__ import annotations

import importlib
import inspect
import re
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from reshard_ranks import on_ranks, single

from asyncmoe.config.transports import TRANSPORTS, TransportEntry, resolved, transport_for
from asyncmoe.errors import AsyncmoeError, ConfigError
from asyncmoe.models import MegatronParallel
from asyncmoe.reshard import Exchanger, Plan, plan
from asyncmoe.reshard.layout import rows, whole
from asyncmoe.weights.protocol import EngineRanks, Terms
from asyncmoe.weights.receiver import channel, hosting
from asyncmoe.weights.receiver.control_store import Store
from tests.unit import doc_pages

FILE, TABLE = "asyncmoe/reshard/unix_transport.py", "in TRANSPORTS of asyncmoe/config/transports.py"
PAGE = doc_pages.read("guides/transport.md")


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
    assert [transport_for("auto", gpu) for gpu in (False, True)] == ["shm", "ipc"]
    assert transport_for("auto", gpu=True, together=False) == "nccl"
    for gpu, together in product((False, True), repeat=2):
        error = refusal("auto", gpu, together=False, shared=True)
        assert (error is not None, error and error.what) == (True, "placement")
        assert not TRANSPORTS[transport_for("auto", gpu, shared=True)].unshared
        assert resolved("auto", gpu, together=False, shared=True) == transport_for("auto", gpu)
        assert transport_for("auto", gpu, together) in TRANSPORTS
        for name, entry in TRANSPORTS.items():
            serves = entry.gpu == gpu and (together or not entry.one_host)
            refused = refusal(name, gpu, together, shared=False)
            assert (refused is None) == serves
            if refused is not None:
                assert (refused.what, refused.got) == ("sync.transport", name)
                assert name not in re.split(" between | where ", str(refused.expected))[0].replace(",", "").split()


@pytest.fixture
def unix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guide's transport in the table, its file in a folder of its own."""
    (tmp_path / "unix_transport.py").write_text(doc_pages.files(PAGE)[FILE])
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = eval("{" + doc_pages.files(PAGE)[TABLE] + "}", {"TransportEntry": TransportEntry})["unix"]
    monkeypatch.setitem(TRANSPORTS, "unix", replace(entry, opened_by="unix_transport:open_unix"))
    yield
    sys.modules.pop("unix_transport", None)


@pytest.mark.usefixtures("unix")
def test_the_guides_entry_is_refused_in_the_guides_words() -> None:
    assert transport_for("unix", gpu=False) == "unix"
    assert transport_for("auto", gpu=False) == "shm"
    assert f"{refusal('unix', True, True, False)}\n" == doc_pages.blocks(PAGE, "output")[0].text
    assert refusal("unix", False, False, False) is not None


def meeting(transport: str) -> tuple[Terms, list[Store]]:
    """The terms and stores of a trainer rank and two engine ranks in this process."""
    engines = (EngineRanks("A", 2, 1, 1),)
    terms = Terms({}, None, MegatronParallel(), engines, "float32", "float32", transport, secrets.token_hex(8), 1 << 8, 10.0)
    hosted = hosting.host("loopback")
    where = hosting.place(hosted)
    return terms, [Store("test", 0, *where, 5.0, hosted), *(Store("test", rank, *where, 5.0) for rank in (1, 2))]


def one_to_two() -> Plan:
    shape = (8, 16)
    return plan({"w": shape}, [single(0, "w", "w", whole(shape))], [single(r, "w", "w", rows(shape, 4 * r - 4, 4)) for r in (1, 2)])


@pytest.mark.usefixtures("unix")
def test_a_channel_opens_what_the_terms_name() -> None:
    terms, stores = meeting("unix")
    values = np.arange(128, dtype=np.int32).reshape(8, 16)
    got = {rank: {"w": np.zeros((4, 16), np.int32)} for rank in (1, 2)}

    def connected(rank: int) -> Exchanger:
        exchanger = channel.connect(stores[rank], terms, one_to_two(), 1)
        exchanger.bind({"w": values} if rank == 0 else None, got.get(rank))
        return exchanger

    def run(rank: int) -> None:
        exchangers[rank].run(10.0)

    with ThreadPoolExecutor(3) as threads:
        exchangers = list(threads.map(connected, range(3)))
    assert on_ranks(range(3), run) == {}
    np.testing.assert_array_equal(np.concatenate([got[1]["w"], got[2]["w"]]), values)
    exchangers[0].close()
    assert ["rank 0 is gone" in str(error) for error in on_ranks((1, 2), run).values()] == [True, True]
    for exchanger in exchangers[1:]:
        exchanger.close()
    assert not list(Path("/dev/shm").glob(f"*{terms.session}*"))


def test_what_opening_raised_is_said_once_on_every_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(TRANSPORTS, "mine", TransportEntry("nothing", "os:stat", gpu=False))
    terms, stores = meeting("mine")

    errors = on_ranks(range(3), lambda rank: channel.connect(stores[rank], terms, one_to_two(), 1))
    (said,) = {str(error) for error in errors.values()}
    assert [isinstance(error, AsyncmoeError) for error in errors.values()] == [True] * 3
    assert re.fullmatch(r"TypeError: .*ChannelEnd \((trainer|A) rank \d on .*, cpu\)", said), said
    assert "Traceback" in caplog.text
