"""Version formats of packages, NCCL and CUDA, and the NVIDIA driver that a CUDA version needs.

requirements/check_gpu.py runs this file by path before anything is installed, so it imports only the standard library at its top.
"""

from __future__ import annotations

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch for a CUDA major version (NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1)."""


def within(version: str, specifier: str) -> bool:
    """Return whether a package's version satisfies a specifier such as `>=0.16.1,<0.20`; pre-releases and local builds are accepted."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def nccl(number: int) -> str:
    """Format NCCL's version number: 22703 is 2.27.3 (NCCL_VERSION in nccl.h since 2.9)."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def cuda(number: int) -> str:
    """Format CUDA's version number: 12080 is 12.8 (CUDA_VERSION in cuda.h)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_hint(cuda: int) -> str:
    """Return the fix for a driver that is too old for a CUDA major version."""
    wanted = f"update NVIDIA's driver to {OLDEST_DRIVER[cuda]} or newer" if cuda in OLDEST_DRIVER else "update NVIDIA's driver"
    compatible = f"NVIDIA's package cuda-compat-{cuda}-0 with its directory first on LD_LIBRARY_PATH"
    return f"{wanted}; on a data-centre GPU (H100, H200) {compatible} also suffices"


def driver_too_old(driver: str, newest_cuda: int | None, cuda: int) -> bool:
    """Return whether the driver is too old for programs of a CUDA major version.

    Args:
        driver: version of the kernel driver from nvidia-smi, e.g. 550.54.15.
        newest_cuda: result of cuDriverGetVersion, e.g. 12040; None if libcuda cannot be opened. A compatibility package increases it.
        cuda: the major version, one of OLDEST_DRIVER.
    """
    if newest_cuda is not None and newest_cuda // 1000 >= cuda:
        return False
    branch = driver.split(".")[0]
    return newest_cuda is not None or (branch.isdigit() and int(branch) < OLDEST_DRIVER[cuda])
