"""Fails with one line unless this Python's torch is the CUDA build, and NCCL the version, of gpu.txt."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path

HINT = (
    "look for an index of other builds in `pip config list` and in PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS; without it "
    "(PIP_CONFIG_FILE=/dev/null leaves out pip's files) run: make setup GPU=1"
)


def pins() -> dict[str, str]:
    """Return the pinned versions by name."""
    text = (Path(__file__).resolve().parent / "gpu.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", text, re.MULTILINE))


def refusal(version: str, cuda: str | None, nccl: str | None, wanted: Mapping[str, str]) -> str | None:
    """Return the fault of an installed torch, or None.

    Args:
        version: torch's version with the local part (2.14.1+cpu).
        cuda: CUDA version of the build (13.0); None for a CPU build.
        nccl: version of the installed package nvidia-nccl-cu13.
        wanted: the pinned versions.
    """
    major = wanted["cuda-toolkit"].split(".")[0]
    if version.split("+")[0] != wanted["torch"] or cuda is None or cuda.split(".")[0] != major:
        return (
            f"torch: got {version}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}, expected {wanted['torch']} for CUDA {major}; {HINT}"
        )
    if nccl != wanted["nvidia-nccl-cu13"]:
        return f"nvidia-nccl-cu13: got {nccl or 'none'}, expected {wanted['nvidia-nccl-cu13']}, as in both environments; {HINT}"
    return None


def offered(version: str) -> str | None:
    """Return the fault of a CPU build that pip would install, before pip downloads it."""
    return refusal(version, None, None, pins())


def main() -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        why = str(error).splitlines()[0]
        sys.exit(f"torch: got one that cannot be imported ({why}), expected a CUDA build; run: make clean; make setup GPU=1")
    try:
        nccl = importlib.metadata.version("nvidia-nccl-cu13")
    except importlib.metadata.PackageNotFoundError:
        nccl = None
    if why := refusal(torch.__version__, torch.version.cuda, nccl, pins()):
        sys.exit(why)


if __name__ == "__main__":
    main()
