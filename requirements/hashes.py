"""Writes what CPU installations on Linux x86_64 get, each file with its SHA-256, into hashed/.

The Makefile installs these lists with `pip --require-hashes` where there is one for the Python and machine, else the same versions without.
torch is in none: which build a machine takes depends on its package sources (torch.sh). Run it after a change of versions:

usage: python3 requirements/hashes.py PYTHON...      (e.g. python3.11; some minutes each)
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESOLVE: Mapping[str, Any] = runpy.run_path(str(HERE / "resolve.py"))
ENVIRONMENTS = {"trainer": ("train.txt", "dev.txt"), "engine": ("engine-cpu.txt", "engine-cpu-nodeps.txt")}
"""Requirement files by environment; together they name every package of it but torch and pip."""
_TIMEOUT_S = 1800.0
_TAG = "import platform, sys; print('cp%d%d' % sys.version_info[:2], platform.machine(), sep='-')"


def main(interpreters: Iterable[str]) -> None:
    """Write both lists for each interpreter."""
    for interpreter in interpreters:
        tag = subprocess.run([interpreter, "-c", _TAG], capture_output=True, text=True, check=True).stdout.strip()
        for name, files in ENVIRONMENTS.items():
            text = listed(name, tag, report(interpreter, files))
            path = HERE / "hashed" / f"{name}-cpu-{tag}.txt"
            path.write_text(text)
            print(f"{path.relative_to(HERE.parent)}: {text.count('--hash')} files")


def report(interpreter: str, files: Iterable[str]) -> Mapping[str, Any]:
    """Return pip's report of an installation of `files` alone. pip's configuration is ignored, because it is machine-specific."""
    asked = [part for file in files for part in ("-r", str(HERE / file))]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=_TIMEOUT_S)
        command = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        answer = f"{folder}/report.json"
        subprocess.run([*command, "--report", answer, *asked], check=True, timeout=_TIMEOUT_S, env=RESOLVE["environment"]())
        found: Mapping[str, Any] = json.loads(Path(answer).read_text())
        return found


def listed(name: str, tag: str, answer: Mapping[str, Any]) -> str:
    """Return the list of one of pip's reports (pip.pypa.io, "Installation Report")."""
    lines = [f"# {name}, GPU=0, {tag}, Linux: made by requirements/hashes.py."]
    for package in sorted(answer["install"], key=lambda one: RESOLVE["normalised"](one["metadata"]["name"])):
        metadata, digest = package["metadata"], package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{RESOLVE['normalised'](metadata['name'])}=={metadata['version']} --hash=sha256:{digest}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
