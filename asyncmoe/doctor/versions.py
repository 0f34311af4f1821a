"""Version formats of packages, NCCL and CUDA."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version


def within(version: str, specifier: str) -> bool:
    """Return whether a package's version satisfies a specifier such as `>=0.16.1,<0.20`; pre-releases and local builds are accepted."""
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


def cuda_number(version: str) -> int:
    """Parse a CUDA version: 12.8 is 12080; anything after the minor version is ignored."""
    major, minor = [int(part) for part in version.split(".")[:2]]
    return 1000 * major + 10 * minor
