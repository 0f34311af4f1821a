"""Writes what pip resolves for both environments, without installing it: of GPU=1 the versions, into resolved/; of CPU installations each
file with its SHA-256, into hashed/.

The Makefile uses the former as constraints, so that every machine gets the reviewed versions, and installs the latter with
`pip --require-hashes` where there is a list for the Python and machine. torch is in no list with hashes: which build a machine takes
depends on its package sources (torch.sh). Run it on Linux x86_64 after a change of versions, with every Python that has a list:

usage: python3 requirements/resolve.py PYTHON...      (e.g. python3.11 python3.12; some minutes each)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = {
    "trainer": ("nvcc.txt", "train.txt", "dev.txt", "transformer-engine.txt"),
    "engine": ("engine-gpu.txt",),
}
"""Requirement files by environment that the Makefile passes to pip with GPU=1, in addition to torch."""
HASHED = {"trainer": ("train.txt", "dev.txt"), "engine": ("engine-cpu.txt", "engine-cpu-nodeps.txt")}
"""Requirement files by environment that together name every package of it on a CPU but torch and pip."""
_TIMEOUT_S = 1800.0
_TAG = "import platform, sys; print('cp%d%d' % sys.version_info[:2], platform.machine(), sep='-')"


def main(interpreters: Iterable[str]) -> None:
    """Write the four lists for each interpreter."""
    for interpreter in interpreters:
        tag = subprocess.run([interpreter, "-c", _TAG], capture_output=True, text=True, check=True).stdout.strip()
        for name, files in ENVIRONMENTS.items():
            # Building a package would need torch, so only wheels are allowed.
            found = resolved(interpreter, ["--only-binary", ":all:", "-c", str(HERE / "gpu.txt"), "torch"], files)
            _write(HERE / "resolved" / f"{name}-gpu-{tag.partition('-')[0]}.txt", f"{name}, GPU=1, {tag}", [line for line, _ in found])
        for name, files in HASHED.items():
            found = resolved(interpreter, ["--no-deps"], files)
            hashed = [f"{line} --hash=sha256:{sha}" for line, sha in found]
            _write(HERE / "hashed" / f"{name}-cpu-{tag}.txt", f"{name}, GPU=0, {tag}", hashed)


def resolved(interpreter: str, options: Sequence[str], files: Iterable[str]) -> list[tuple[str, str]]:
    """Return what pip chooses for an empty environment, in the order of normalised names: "name==version", and the SHA-256 of its file.

    pip's configuration is ignored, because it is machine-specific. Source of the report: pip.pypa.io, "Installation Report".
    """
    asked = [part for file in files for part in ("-r", str(HERE / file))]
    ours = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    alone = ours | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=_TIMEOUT_S)
        command = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        answer = f"{folder}/report.json"
        subprocess.run([*command, "--report", answer, *options, *asked], check=True, timeout=_TIMEOUT_S, env=alone)
        chosen: list[dict[str, Any]] = json.loads(Path(answer).read_text())["install"]
    named = sorted((normalised(one["metadata"]["name"]), one) for one in chosen)
    return [(f"{name}=={one['metadata']['version']}", one["download_info"]["archive_info"]["hashes"]["sha256"]) for name, one in named]


def normalised(name: str) -> str:
    """Normalise a name as package indices do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _write(path: Path, what: str, lines: Sequence[str]) -> None:
    path.write_text("\n".join([f"# {what}, Linux: made by requirements/resolve.py.", *lines]) + "\n")
    print(f"{path.relative_to(HERE.parent)}: {len(lines)} packages")


if __name__ == "__main__":
    main(sys.argv[1:])
