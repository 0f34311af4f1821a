"""Say in one line, before anything is installed with GPU=1, when this machine's driver cannot run it.

Without a driver that answers the install goes on, with a line that says so: a node without GPUs may prepare the directory that others use.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCTOR = HERE.parent / "asyncmoe" / "doctor"
SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SMI_S = 60.0

drivers = runpy.run_path(str(DOCTOR / "drivers.py"))


@dataclass(frozen=True)
class Facts:
    """Of NVIDIA's driver.

    Attributes:
        driver: e.g. 550.54.15; None: nvidia-smi did not answer.
        silence: why it did not.
        newest_cuda: what libcuda takes, e.g. 12040; None: it cannot be opened.
    """

    driver: str | None
    silence: str = ""
    newest_cuda: int | None = None


def gather() -> Facts:
    newest = runpy.run_path(str(DOCTOR / "probes" / "python_probe.py"))["cuda_driver"]()
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, errors="replace", check=False, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Facts(None, str(error), newest)
    first = (done.stdout.strip() or done.stderr.strip()).split("\n")[0]
    if done.returncode != 0 or not re.fullmatch(r"\d+(\.\d+)*", first):
        return Facts(None, first or f"nvidia-smi ended with status {done.returncode}", newest)
    return Facts(first, "", newest)


def wanted_cuda() -> int:
    """The major version of the CUDA that gpu.txt names."""
    found = re.search(r"^cuda-toolkit==(\d+)\.", (HERE / "gpu.txt").read_text(), re.MULTILINE)
    if found is None:
        sys.exit("requirements/gpu.txt: got no line cuda-toolkit==..., expected one; restore it")
    return int(found[1])


def refusal(facts: Facts, cuda: int) -> str | None:
    """Why CUDA builds of a major version cannot run on this machine; None: they can, or nobody knows."""
    if facts.driver is None or not drivers["too_old"](facts.driver, facts.newest_cuda, cuda):
        return None
    can = f", for CUDA {facts.newest_cuda // 1000}.{facts.newest_cuda % 1000 // 10}" if facts.newest_cuda else ""
    return (
        f"NVIDIA's driver: got {facts.driver}{can}, expected {drivers['OLDEST'][cuda]} or newer: GPU=1 installs CUDA {cuda} only, as "
        f"SGLang does; {drivers['cure'](cuda)}"
    )


def main() -> None:
    facts, cuda = gather(), wanted_cuda()
    if why := refusal(facts, cuda):
        sys.exit(why)
    if facts.driver is None:
        print(
            f"GPU=1: no driver of NVIDIA's answers here ({facts.silence}); CUDA {cuda} builds are installed all the same, for machines "
            f"with driver {drivers['OLDEST'][cuda]} or newer",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
