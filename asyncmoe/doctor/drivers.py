"""The NVIDIA driver that a CUDA version needs. Imports only the standard library: requirements/check_gpu.py runs this file by path."""

from __future__ import annotations

OLDEST = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch for a CUDA major version (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""


def cure(cuda: int) -> str:
    """Return the fix for a driver that is too old for a CUDA major version."""
    wanted = f"update NVIDIA's driver to {OLDEST[cuda]} or newer" if cuda in OLDEST else "update NVIDIA's driver"
    compatible = f"NVIDIA's package cuda-compat-{cuda}-0 with its directory first on LD_LIBRARY_PATH"
    return f"{wanted}; on a data-centre GPU (H100, H200) {compatible} does too"


def too_old(driver: str, newest_cuda: int | None, cuda: int) -> bool:
    """Return whether the driver is too old for programs of a CUDA major version.

    Args:
        driver: version of the kernel driver from nvidia-smi, e.g. 550.54.15.
        newest_cuda: result of cuDriverGetVersion, e.g. 12040; None if libcuda cannot be opened. A compatibility package raises it.
        cuda: the major version, one of OLDEST.
    """
    if newest_cuda is not None and newest_cuda // 1000 >= cuda:
        return False
    branch = driver.split(".")[0]
    return newest_cuda is not None or (branch.isdigit() and int(branch) < OLDEST[cuda])
