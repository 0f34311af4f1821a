"""Writes the package versions that pip resolves for both environments with GPU=1 into resolved/, without installing them.

The Makefile uses the lists as constraints, so that every machine gets the reviewed versions, and a test compares them. Run it on Linux
x86_64 after a change of versions, with every Python that has a list:

usage: python3 requirements/resolve.py PYTHON...      (e.g. python3.11 python3.12; some minutes each)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = {
    "trainer": ("nvcc.txt", "train.txt", "dev.txt", "transformer-engine.txt"),
    "engine": ("engine-gpu.txt",),
}
"""Requirement files by environment that the Makefile passes to pip with GPU=1, in addition to torch."""
_RESOLVE_S = 1800.0


def main(interpreters: list[str]) -> None:
    """Write both lists for each interpreter."""
    for interpreter in interpreters:
        for name, files in ENVIRONMENTS.items():
            tag, versions = resolve(interpreter, files)
            path = HERE / "resolved" / f"{name}-gpu-{tag}.txt"
            path.write_text(
                f"# {name}, GPU=1, CPython {tag[2]}.{tag[3:]}, Linux x86_64: made by requirements/resolve.py.\n" + lines(versions)
            )
            print(f"{path.relative_to(HERE.parent)}: {len(versions)} packages, torch {versions['torch']}")


def resolve(interpreter: str, files: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the tag of the Python (cp311), and the versions by normalised name that pip chooses for an empty environment.

    Only wheels are allowed, because building a package would need torch. pip's configuration is ignored, because it is machine-specific.
    """
    asked = [part for file in files for part in ("-r", str(HERE / file))]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([interpreter, "-m", "venv", folder], check=True, timeout=_RESOLVE_S)
        python, report = f"{folder}/bin/python", f"{folder}/report.json"
        command = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--only-binary",
            ":all:",
            "--report",
            report,
        ]
        subprocess.run([*command, "-c", str(HERE / "gpu.txt"), "torch", *asked], check=True, timeout=_RESOLVE_S, env=environment())
        answer = json.loads(Path(report).read_text())
        tag = subprocess.run(
            [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
        )
    chosen = [package["metadata"] for package in answer["install"]]
    return tag.stdout.strip(), {normalised(package["name"]): package["version"] for package in chosen}


def environment() -> Mapping[str, str]:
    """Return this process's environment without additional package sources for pip."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def normalised(name: str) -> str:
    """Normalise a name as package indices do (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(versions: Mapping[str, str]) -> str:
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))


if __name__ == "__main__":
    main(sys.argv[1:])
