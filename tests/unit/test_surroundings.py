"""Site conditions: users without a name or a home, proxies, and output that nobody reads."""

from __future__ import annotations

import asyncio
import getpass
import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncmoe import surroundings
from asyncmoe.rollout.scoring.http import Poster
from asyncmoe.rollout.scoring.types import Later

URL = "http://judge.invalid:9/score"
"""Only a proxy knows this host."""
PROXIES = [name for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without proxies, which is restored whatever `settle` makes of it. All folders are another user's to write to."""
    for name in (*PROXIES, "no_proxy", "NO_PROXY", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    return monkeypatch


@pytest.mark.parametrize("home", ["", "/etc/passwd", "relative"])
def test_a_user_without_a_name_and_a_home_gets_both(bare: pytest.MonkeyPatch, tmp_path: Path, home: str) -> None:
    surroundings.settle()
    assert Path.home() == tmp_path, "one's own stays, though it cannot be written to"
    bare.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    bare.setenv("HOME", home) if home else bare.delenv("HOME")
    surroundings.settle()
    assert Path.home() == tmp_path / f"asyncmoe-home-{os.geteuid()}"
    assert Path.home().stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == str(os.geteuid())


@pytest.mark.parametrize("proxy", ["http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("given", ["mine, theirs", "*"])
def test_libraries_reach_this_machine_without_a_proxy(bare: pytest.MonkeyPatch, proxy: str, given: str) -> None:
    bare.setenv("no_proxy", given)
    surroundings.settle()
    assert os.environ["no_proxy"] == given
    bare.setenv(proxy, "http://proxy:3128")
    for _ in range(2):
        surroundings.settle()
        names = os.environ["no_proxy"].split(",")
        assert names == ["*"] or (names[:2] == ["mine", "theirs"] and {"localhost", "::1", os.uname().nodename} <= {*names})
        assert len({*names}) == len(names)


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        (URL, "", None),
        ("https://judge/", "http_proxy=http://p:1 HTTPS_PROXY=http://u:w@q:1", "http://u:w@q:1"),
        (URL, "ALL_PROXY=p:1", "http://p:1"),
        (URL, "http_proxy=http://p:1 no_proxy=judge.invalid:8", "http://p:1"),
        ("http://10.1.2.3:80/", "http_proxy=http://p:1 no_proxy=10.0.0.1,10.0.0.0/8", None),
        ("http://11.1.2.3:80/", "http_proxy=http://p:1 no_proxy=10.0.0.0/8", "http://p:1"),
        (URL, "all_proxy=socks5h://p:1", None),
    ],
)
def test_the_proxy_of_a_url(bare: pytest.MonkeyPatch, url: str, environment: str, proxy: str | None) -> None:
    for word in environment.split():
        bare.setenv(*word.split("="))
    assert surroundings.proxy_for(url) == proxy


def test_what_leaves_the_machine_goes_through_the_proxy(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("http_proxy", "http://127.0.0.1:1")
    poster = Poster(URL, 5.0)

    async def ask() -> None:
        try:
            await poster.post(b"{}", 100)
        finally:
            await poster.close()

    with pytest.raises(Later, match=r"127\.0\.0\.1:1"):
        asyncio.run(ask())


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_a_command_ends_well_in_any_locale_and_without_descriptors(closed: str, tmp_path: Path) -> None:
    demo = (Path(__file__).parents[2] / "examples" / "demo.yaml").read_text()
    (tmp_path / "ä.yaml").write_text(demo.replace("runs/demo", "runs/ä"), encoding="utf-8")
    narrow = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for key, said in (("engines.join=true", "ä.yaml is valid: "), (f"run.dir={tmp_path}/ö", "ö"), ("run.dir=/proc/ö", "got /proc/ö")):
        program = f'"$0" -m asyncmoe config {"show" if said == "ö" else "validate"} "$1" "$2" {closed}'
        command = ["bash", "-c", program, sys.executable, str(tmp_path / "ä.yaml"), key]
        done = subprocess.run(command, cwd=tmp_path, env=narrow, capture_output=True, timeout=120, check=False)
        assert done.returncode == (2 if "proc" in key else 0), done.stderr
        assert said in (done.stdout + done.stderr).decode() or closed != "<&-"


SAYS = "import sys; from asyncmoe.process import unbroken_output as u; u(); [print('x' * 9999, flush=True) for _ in range(99)]; sys.exit(7)"


@pytest.mark.parametrize("to", ["| true", ">&-", ">/dev/full 2>&1"])
def test_a_process_goes_on_without_a_reader_of_its_output(to: str) -> None:
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" {to}', sys.executable, SAYS], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (7, b"")
