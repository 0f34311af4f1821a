"""Every shell script of the checkout can be parsed, and shellcheck finds nothing in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("slurm", "requirements", "tests", ".ci", "examples")


def is_shell(path: Path) -> bool:
    if path.suffix in (".sh", ".sbatch"):
        return True
    with path.open("rb") as file:
        first = file.readline()
    return first.startswith(b"#!") and first.strip().endswith((b"bash", b"/sh"))


SCRIPTS = [
    str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and is_shell(path)
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_can_parse_it(script: str) -> None:
    done = subprocess.run(["bash", "-n", script], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck (requirements/system.sh)")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
