"""Another user of the machine tries every port and file of a run, and nothing is answered or written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncmoe.platform.sglang.lifetime import API_KEY
from tests.system.runs import REPOSITORY, further, logs, metrics, provide, start, summary_of, wait_for

pytestmark = [
    pytest.mark.system,
    pytest.mark.thorough,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
_UNAUTHORIZED = b'{"error": {"message": "Unauthorized"}}'


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, and in it one for temporary files, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="second-"))
    folder.chmod(0o755)
    (folder / "t").mkdir()
    (folder / "t").chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Exposed:
    """What a run has that another user might reach.

    Attributes:
        tcp, udp: addresses and ports it listens on.
        unix: its Unix sockets with a name; an abstract one begins with @.
        files: its files and folders.
        secrets: keys that must not be read.
    """

    pids: list[int]
    tcp: list[tuple[str, int]]
    udp: list[tuple[str, int]]
    unix: list[str]
    files: list[str]
    secrets: list[str]


def exposed(run_dir: Path, temporary: Path, supervisor: int) -> Exposed:
    """What a run has now, as the kernel knows it."""
    parent = psutil.Process(supervisor)
    run = [parent, *parent.children(recursive=True)]
    files, secrets = set[str](), list[str]()
    for one in run:
        with suppress(psutil.NoSuchProcess):
            held = (*(file.path for file in one.open_files()), *(mapped.path for mapped in one.memory_maps()))
            files |= {path for path in held if path.startswith((str(run_dir), str(temporary), "/dev/shm/"))}
            secrets += [one.environ()[API_KEY]] if API_KEY in one.environ() else []
    for root in (run_dir, *temporary.iterdir()):
        files |= {str(root), *(str(path) for path in root.rglob("*"))}
    rendezvous = json.loads((run_dir / "rendezvous.json").read_text())
    secrets += [rendezvous["client_secret"], rendezvous["local_secret"]]
    assert all(len(secret) >= 32 for secret in secrets)
    tcp, udp, unix = (_sockets(run, kind) for kind in ("tcp", "udp", "unix"))
    places = [sorted({(one.laddr.ip, one.laddr.port) for one in found}) for found in (tcp, udp)]
    return Exposed([one.pid for one in run], *places, sorted({one.laddr for one in unix if one.laddr}), sorted(files), secrets)


def _sockets(run: list[psutil.Process], kind: str) -> list[Any]:
    """Those of one kind that a run has; of TCP, those that it listens on."""
    found = []
    for one in run:
        with suppress(psutil.NoSuchProcess):
            found += one.net_connections(kind)
    return [one for one in found if kind != "tcp" or one.status == psutil.CONN_LISTEN]


def attacked(stranger: subprocess.Popen[str], targets: Exposed) -> dict[str, Any]:
    told = {"pids": targets.pids, "tcp": targets.tcp, "unix": targets.unix, "files": targets.files}
    out, _ = stranger.communicate(json.dumps(told) + "\n", timeout=120)
    found: dict[str, Any] = json.loads(out)
    return found


def test_another_user_gets_and_changes_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(place / "model")  # what makes it may leave a folder of torch's among temporary files, which is not the run's
    monkeypatch.setenv("TMPDIR", str(place / "t"))
    run_dir = place / "run"
    stranger = subprocess.Popen(
        [sys.executable, "-m", "tests.system.stranger"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # within a session everybody may send SIGCONT (kill(2))
    )
    settings = ("warmup.steps=0", "run.steps=2000", "trainer.checkpoint_every=2")
    command = start(run_dir, "engines.tp=2", *settings)
    try:
        assert stranger.stdout.readline() == "ready\n"
        assert wait_for(lambda: len(metrics(run_dir)) > 2, 120), logs(run_dir)
        targets = exposed(run_dir, place / "t", command.process.pid)
        found = attacked(stranger, targets)
        assert wait_for(further(run_dir, 2), 60), logs(run_dir)
    finally:
        stranger.kill()
        command.process.send_signal(signal.SIGINT)
        status, _, error = command.finish(60)
    print(json.dumps({key: value for key, value in found.items() if key != "read"})[:3000])
    check_targets(targets)
    check_sockets(found)
    assert found["files"] == []
    assert found["read"] == {}
    assert not [secret for secret in targets.secrets if any(secret in (line or "") for line in found["commands"].values())]
    assert "resumes from" in error or status == 0, error
    assert summary_of(run_dir)["max_abs_logprob_diff_same_version"] <= 1e-5
    assert command.gone(), command.alive()


def check_targets(targets: Exposed) -> None:
    """The attack has met all that there is."""
    assert len(targets.pids) >= 8, "supervisor, controller, torchrun, two ranks, a server with two schedulers and a detokenizer"
    assert len(targets.tcp) > 20, "gloo's and the server's"
    assert {host for host, _ in targets.tcp} == {"127.0.0.1"}
    assert targets.udp == []
    assert len(targets.unix) >= 3, "the controller's and SGLang's"
    assert not [name for name in targets.unix if name.startswith("@")]
    text = "\n".join(targets.files)
    run = ("metrics.jsonl", "log/0/lock", "rendezvous.json", "samples", "checkpoints", "logs/trainer.log")
    for part in (*run, "/ranks", "/workers", "asyncmoe-meeting-", "/dev/shm/"):
        assert part in text, part


def check_sockets(found: dict[str, Any]) -> None:
    """Only the server answers at all, with a refusal."""
    assert {why for answers in found["unix"].values() for why in answers} == {"! Permission denied"}
    spoken = {place: [a.encode("latin1") for a in answers if not a.startswith("!") and a] for place, answers in found["tcp"].items()}
    spoken = {place: answers for place, answers in spoken.items() if answers}
    assert len(spoken) == 1, spoken
    (answers,) = spoken.values()
    assert not [reply for reply in answers if not reply.startswith(b"HTTP/1.1 ")]
    told = {(reply.split(b" ")[1], reply.partition(b"\r\n\r\n")[2]) for reply in answers}
    assert (b"401", _UNAUTHORIZED) in told
    assert told <= {(b"401", _UNAUTHORIZED), (b"400", b"Invalid HTTP request received.")}, told
