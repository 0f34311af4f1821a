"""Fails with one line if this machine's driver cannot run the packages of GPU=1; runs before anything is installed.

Without a responding driver the installation continues with a notice, because a node without GPUs may prepare a directory for others.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
DOCTOR = HERE.parent / "asyncmoe" / "doctor"
SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SMI_S = 60.0

versions = SimpleNamespace(**runpy.run_path(str(DOCTOR / "versions.py")))


@dataclass(frozen=True)
class Facts:
    """Facts about NVIDIA's driver.

    Attributes:
        driver: version, e.g. 550.54.15; None if nvidia-smi did not answer.
        silence: why nvidia-smi did not answer.
        newest_cuda: newest CUDA version that libcuda supports, e.g. 12040; None if it cannot be opened.
    """

    driver: str | None
    silence: str = ""
    newest_cuda: int | None = None


def gather() -> Facts:
    newest = runpy.run_path(str(DOCTOR / "python_probe.py"))["cuda_driver"]()
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, errors="replace", check=False, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Facts(None, str(error), newest)
    first = (done.stdout.strip() or done.stderr.strip()).split("\n")[0]
    if done.returncode != 0 or not re.fullmatch(r"\d+(\.\d+)*", first):
        return Facts(None, first or f"nvidia-smi ended with status {done.returncode}", newest)
    return Facts(first, "", newest)


def wanted_cuda() -> int:
    """Return the major version of CUDA in gpu.txt."""
    found = re.search(r"^cuda-toolkit==(\d+)\.", (HERE / "gpu.txt").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("requirements/gpu.txt: got no line cuda-toolkit==..., expected one; restore it")
    return int(found[1])


def refusal(facts: Facts, cuda: int) -> str | None:
    """Return why CUDA builds of a major version cannot run on this machine; None if they can, or if it is unknown."""
    if facts.driver is None or not versions.driver_too_old(facts.driver, facts.newest_cuda, cuda):
        return None
    can = f", for CUDA {versions.cuda(facts.newest_cuda)}" if facts.newest_cuda else ""
    return (
        f"NVIDIA's driver: got {facts.driver}{can}, expected {versions.OLDEST_DRIVER[cuda]} or newer: GPU=1 installs CUDA {cuda} only, as "
        f"SGLang does; {versions.driver_hint(cuda)}"
    )


def main() -> None:
    facts, cuda = gather(), wanted_cuda()
    if why := refusal(facts, cuda):
        sys.exit(why)
    if facts.driver is None:
        print(
            f"GPU=1: no driver of NVIDIA's answers here ({facts.silence}); CUDA {cuda} builds are installed all the same, for machines "
            f"with driver {versions.OLDEST_DRIVER[cuda]} or newer",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
