"""A user who may do nothing: no capability, no entry in passwd, no home, a dead proxy, no reader, nothing but a checkout, a TMPDIR, and a
task and a scorer of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.system.runs import ENGINES, MARK, REPOSITORY, SMALL, logs, marked, summary_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")]
UID = 54321
OWN = (
    *("task={kind: tests.unit.task_sources:Capitals, chat_template: false}", "warmup={steps: 4, batch: 16}"),
    "scoring.scorer=tests.unit.scorers:length",
)
PRIVILEGES = ("--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")


def opened(place: Path) -> str:
    """A script that shows the checkout and its Pythons where they are, in a mount namespace, if only root may reach them there."""
    needed = {REPOSITORY, *((REPOSITORY / name).resolve() for name in (".venv", ".venv-engine"))}
    binds, covers = ["set -e"], dict[str, None]()
    for path in sorted(needed | {Path(sys.base_prefix).resolve(), ENGINES.resolve().parents[1]}):
        if closed := next((one for one in reversed(path.parents) if not one.stat().st_mode & 0o001), None):
            shown = f"{place}/shown{str(closed).replace('/', '_')}"
            inside = f"'{shown}/{path.relative_to(closed)}'"
            binds.append(f"mkdir -p {inside}; mount --bind '{path}' {inside}")
            covers[f"mount --rbind '{shown}' '{closed}'"] = None
    return "\n".join([*binds, *covers, 'umask 077; exec "$@"'])


def test_a_run_needs_no_privilege_no_name_no_home_and_no_proxy() -> None:
    """Without optional system calls, too: a filter refuses them."""
    mark = uuid.uuid4().hex
    proxies = {name: "http://127.0.0.1:9" for scheme in ("http", "https", "all") for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())}
    with tempfile.TemporaryDirectory(prefix="unprivileged-") as place, Path("/dev/full").open("w") as full:
        os.chown(place, UID, UID)
        environment = {"PATH": os.environ["PATH"], "TMPDIR": place, "PYTHONPATH": str(REPOSITORY), MARK: mark, **proxies}
        places = (f"run.dir={place}/run", f"model.path={place}/run/model")
        user = ("setpriv", f"--reuid={UID}", f"--regid={UID}", *PRIVILEGES, sys.executable, "-m", "tests.system.refusing")
        run = (sys.executable, "-m", "asyncmoe", "run", "examples/demo.yaml", *places, *SMALL, *OWN)
        words = ["unshare", "--mount", "sh", "-c", opened(Path(place)), "sh", *user, *run]
        told: Any = {"cwd": REPOSITORY, "env": environment, "stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(words, timeout=300.0, check=False, **told)
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs(Path(place, 'run'))}"
        assert summary_of(Path(place, "run"))["steps"] == 3
        assert "ProxyError" not in Path(place, "run/logs/engine-0.log").read_text()
    assert wait_for(lambda: not marked(mark), 20.0), marked(mark)
