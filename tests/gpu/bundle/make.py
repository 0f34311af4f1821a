"""Make the bundle: `python tests/gpu/bundle/make.py OUT`, on a machine with a network and any Python with pip.

OUT gets `wheels/`, `asyncmoe.tar.gz` (the committed tree) and `run.sh`. Nothing of OUT is built here: the extension is compiled on the
GPU machine, for its card.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.gpu.bundle import manifest

ROOT = Path(__file__).parents[3]
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
_DOWNLOAD_S = 900.0
_WORTH_LZMA = 48 << 10
"""Bytes of a file from which on it is packed so: to begin costs more than a small file gains."""


def main() -> None:
    """Write the folder named on the command line; it must not exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    out: Path = parser.parse_args().out
    if out.exists():
        sys.exit(f"{out}: got a path that exists, expected a new one; choose another or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "made")
        try:
            commit = fill(made, Path(scratch))
            size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
            if size > manifest.LIMIT_BYTES:
                limit = manifest.LIMIT_BYTES / 1e6
                sys.exit(f"{out}: got {size / 1e6:.1f} MB, expected at most {limit:.0f}; leave more out in manifest.WITHOUT")
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(made, out)  # whole or not at all
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(f"{out}: {error}; got no bundle, expected a git checkout, a package registry and a folder that can be written")
    print(f"{out}: {len(list((out / 'wheels').iterdir()))} wheels, {size / 1e6:.1f} MB in all, of {commit}")


def fill(folder: Path, scratch: Path) -> str:
    """Write everything into a new folder; returns the commit."""
    (folder / "wheels").mkdir(parents=True)
    (scratch / "whole").mkdir()
    for wheel in downloaded(scratch / "whole"):
        slim(wheel, folder / "wheels" / wheel.name)
    commit = archive(folder / "asyncmoe.tar.gz")
    (folder / "commit").write_text(commit + "\n")
    shutil.copy(ROOT / "tests" / "gpu" / "bundle" / "run.sh", folder / "run.sh")
    return commit


def downloaded(folder: Path) -> list[Path]:
    """The wheels of `manifest.WHEELS`, whole, exactly those."""
    pins = manifest.pins(ROOT)
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    python = ["--python-version", manifest.PYTHON, "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    named = [f"{name}=={version}" for name, version in pins.items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *python, *platforms, "--dest", str(folder), *named]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_S)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != len(pins):
        sys.exit(f"pip download: got {len(wheels)} wheels, expected {len(pins)}")
    return wheels


def slim(wheel: Path, target: Path) -> None:
    """Copy a wheel without what `manifest.WITHOUT` names, compressed harder. pip and `zipfile` read it as any other."""
    name = manifest.normal(wheel.name.split("-")[0])
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w") as part:
        for info in whole.infolist():
            if not info.is_dir() and manifest.kept(name, info.filename):
                method = zipfile.ZIP_LZMA if info.file_size >= _WORTH_LZMA else zipfile.ZIP_DEFLATED
                part.writestr(info.filename, whole.read(info), method)


def archive(target: Path) -> str:
    """Write the committed tree; returns the commit, with "+changes" where the work tree differs from it (changes are not carried)."""
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "archive", "--format=tar.gz", "--prefix=asyncmoe/", f"--output={target.resolve()}", "HEAD"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], check=True, capture_output=True, text=True).stdout
    return commit + ("+changes" if changed.strip() else "")


if __name__ == "__main__":
    main()
