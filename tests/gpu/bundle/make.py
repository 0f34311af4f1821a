"""Make what the calls carry: `python tests/gpu/bundle/make.py OUT`, on a machine with a network and any Python with pip.

OUT gets a folder for each call: `wheels/`, `asyncmoe.tar.gz` (the committed tree), `commit`, `call` and `run.sh`. asyncmoe's extension is
compiled on the GPU machine, for its card.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.gpu.bundle import manifest, slim
from tests.gpu.bundle.parts import CALLS

ROOT = Path(__file__).parents[3]
_GLIBC = (5, 12, 17, 18, 24, 26, 27, 28, 31, 34)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
_DOWNLOAD_S = 900.0
_WORTH_LZMA = 48 << 10
"""Bytes of a file from which on it is packed so: to begin costs more than a small file gains."""


def main() -> None:
    """Write the folders of the calls named on the command line; none of them may exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", action="append", choices=CALLS, help="only this one; may be given again")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="has the wheels that no registry has")
    parser.add_argument("out", type=Path, metavar="OUT")
    given = parser.parse_args()
    calls = given.call or list(CALLS)
    if there := [str(given.out / call) for call in calls if (given.out / call).exists()]:
        sys.exit(f"{', '.join(there)}: got a path that exists, expected a new one; choose another or remove it")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheels = {distribution_of(wheel): wheel for wheel in slim_wheels(calls, given.built, Path(scratch))}
            for call in calls:
                made = Path(scratch, call)
                commit = fill(made, call, wheels)
                size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
                if size > manifest.LIMIT_BYTES:
                    limit = f"{manifest.LIMIT_BYTES / 2**20:.0f} MiB"
                    sys.exit(f"{call}: got {size / 2**20:.1f} MiB, expected at most {limit}; leave more out in manifest.WITHOUT")
                given.out.mkdir(parents=True, exist_ok=True)
                shutil.move(made, given.out / call)  # whole or not at all
                print(f"{given.out / call}: {size / 2**20:.1f} MiB, of {commit}", flush=True)
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(f"{given.out}: {error}; got no bundle, expected a git checkout, a package registry and a folder that can be written")


def fill(folder: Path, call: str, wheels: Mapping[str, Path]) -> str:
    """Write everything of a call into a new folder; returns the commit.

    Args:
        wheels: by distribution.
    """
    (folder / "wheels").mkdir(parents=True)
    for name in (*manifest.CARRIED[call], *manifest.BUILT.get(call, ())):
        shutil.copy(wheels[name], folder / "wheels")
    commit = archive(folder / "asyncmoe.tar.gz")
    (folder / "commit").write_text(commit + "\n")
    (folder / "call").write_text(call + "\n")
    shutil.copy(ROOT / "tests" / "gpu" / "bundle" / "run.sh", folder / "run.sh")
    return commit


def slim_wheels(calls: Collection[str], built: Path | None, scratch: Path) -> list[Path]:
    """The wheels of calls, without what `manifest` leaves out of them."""
    whole, part = scratch / "whole", scratch / "part"
    whole.mkdir()
    part.mkdir()
    for name in sorted({name for call in calls for name in manifest.BUILT.get(call, ())}):
        found = [wheel for wheel in (built.glob("*.whl") if built else ()) if distribution_of(wheel) == name]
        if len(found) != 1:
            got = f"{len(found)} in {built}" if built else "no --built"
            sys.exit(f"wheel of {name}: got {got}, expected one in the folder of --built; README.md says what builds it")
        shutil.copy(found[0], whole)
    download(sorted({name for call in calls for name in manifest.CARRIED[call]}), whole)
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda wheel: slim_wheel(wheel, part / wheel.name), sorted(whole.glob("*.whl"))))


def download(names: Collection[str], folder: Path) -> None:
    """Get the wheels of distributions, whole, exactly those."""
    pins, before = manifest.pins(ROOT), len(list(folder.glob("*.whl")))
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    python = ["--python-version", manifest.PYTHON, "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    named = [f"{name}=={pins[name]}" for name in names]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *python, *platforms, "--dest", str(folder), *named]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_S)
    if (got := len(list(folder.glob("*.whl"))) - before) != len(names):
        sys.exit(f"pip download: got {got} wheels, expected {len(names)}")


def slim_wheel(wheel: Path, target: Path) -> Path:
    """Copy a wheel without what `manifest.WITHOUT` and `manifest.SLIMMED` name, compressed harder. pip and `zipfile` read it as any."""
    name = distribution_of(wheel)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w") as part:
        for info in whole.infolist():
            if not info.is_dir() and manifest.kept(name, info.filename):
                content = whole.read(info)
                if name in manifest.SLIMMED and re.search(manifest.SLIMMED[name], info.filename):
                    content = slim.slimmed(content, manifest.ARCHITECTURE)
                part.writestr(info.filename, content, zipfile.ZIP_LZMA if len(content) >= _WORTH_LZMA else zipfile.ZIP_DEFLATED)
    return target


def distribution_of(wheel: Path) -> str:
    """The distribution that a wheel is of, as registries compare names."""
    return manifest.normal(wheel.name.split("-")[0])


def archive(target: Path) -> str:
    """Write the committed tree; returns the commit, with "+changes" where the work tree differs from it (changes are not carried)."""
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "archive", "--format=tar.gz", "--prefix=asyncmoe/", f"--output={target.resolve()}", "HEAD"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], check=True, capture_output=True, text=True).stdout
    return commit + ("+changes" if changed.strip() else "")


if __name__ == "__main__":
    main()
