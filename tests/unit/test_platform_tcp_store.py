"""A TCP store listens only on the address of the rendezvous."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from asyncmoe.platform import tcp_store


def test_the_store_listens_on_the_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # so that it is put back
    tcp_store.install()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank=0, world_size=1))
    store.set("a", b"1")
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()]
    assert [words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
