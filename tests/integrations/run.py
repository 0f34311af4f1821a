"""Runs tests against real packages that no other environment has, each file in an environment of its own: make test-integrations.

    python tests/integrations/run.py                     every tests/integrations/test_NAME.py
    python tests/integrations/run.py wandb mlflow        these two
    python tests/integrations/run.py wandb -- -k tables  the rest goes to pytest

`test_NAME.py` needs `NAME.txt`, pip's requirements, beside it. They are installed into `.venv-integrations/NAME`, anew when the file
changes. A line `# packages of: trainer` (the default), `engine` or `none` says whose installed packages the tests see as well: those of
`.venv`, those of `.venv-engine`, or only pytest. Packages of NAME.txt come before them. A line `# npm: PACKAGE@VERSION ...` names packages
of npm, whose programs lie in `node_modules/.bin` of the environment; without npm on this machine, tests that need them are skipped.
asyncmoe is this checkout, by PYTHONPATH, and the tests start in its root. `tests/conftest.py` is not read. Exits with 1 if a file fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("tests/integrations")
ENVIRONMENTS = Path(".venv-integrations")
SHARED = {"trainer": Path(".venv"), "engine": Path(".venv-engine"), "none": None}
INSTALL_S = 900
TEST_S = 900


@dataclass(frozen=True)
class Case:
    """One file of tests and what it needs."""

    name: str
    packages_of: str
    """A key of SHARED."""
    requirements: str
    """The text of NAME.txt, and of the files that its lines `-r FILE` name."""
    npm: tuple[str, ...] = ()
    """Packages of npm."""

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name

    def digest(self, python: str) -> str:
        """Changes when the environment must be made anew; `python` is the interpreter's version."""
        return hashlib.sha256(f"{python}\n{self.packages_of}\n{self.requirements}".encode()).hexdigest()


def cases(folder: Path, names: list[str]) -> list[Case]:
    """The files named, or all in order of their names. Exits with one line where a file lacks its other half."""
    found = {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("test_*.py"))}
    if unknown := sorted(set(names) - set(found)):
        sys.exit(f"{', '.join(unknown)}: got no {folder}/test_{unknown[0]}.py, expected some of {', '.join(found)}")
    return [_case(path.with_name(f"{name}.txt"), name) for name, path in found.items() if not names or name in names]


def _case(path: Path, name: str) -> Case:
    if not path.exists():
        sys.exit(f"{path}: got none, expected the requirements of test_{name}.py (an empty file: no further packages)")
    text = path.read_text()
    text += "".join((path.parent / name).read_text() for name in re.findall(r"^-r (\S+)$", text, re.MULTILINE))
    said = re.findall(r"^# packages of: *(.*?) *$", text, re.MULTILINE) or ["trainer"]
    if len(said) > 1 or said[0] not in SHARED:
        sys.exit(f"{path}: got packages of {' and of '.join(said)}, expected one of {', '.join(SHARED)}")
    npm = [package for line in re.findall(r"^# npm: *(.*)$", text, re.MULTILINE) for package in line.split()]
    return Case(name, said[0], text, tuple(npm))


def prepare(case: Case) -> Path:
    """Makes the environment where it is not there yet, and returns its Python. Raises subprocess errors of venv and pip."""
    python = case.environment / "bin" / "python"
    stamp, digest = case.environment / ".installed", case.digest(sys.version)
    if stamp.exists() and stamp.read_text() == digest:
        return python
    shutil.rmtree(case.environment, ignore_errors=True)
    _call(sys.executable, "-m", "venv", "--without-pip", str(case.environment))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    shared = SHARED[case.packages_of]
    if shared is not None:
        # A .pth adds to the end of the path: pip takes what is there as installed, and what it adds comes before.
        (Path(_purelib(python)) / "shared.pth").write_text(_purelib(shared / "bin" / "python") + "\n")
    if case.packages_of != "trainer":
        _call(*pip, "pytest")
    if any(line.strip() and not line.lstrip().startswith("#") for line in case.requirements.splitlines()):
        _call(*pip, "-r", str(FOLDER / f"{case.name}.txt"))
    npm = shutil.which("npm")
    if case.npm and npm is None:
        print(f"{case.name}: no npm here: tests with {', '.join(case.npm)} are skipped", flush=True)
    elif case.npm:
        _call(str(npm), "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(case.environment), *case.npm)
    stamp.write_text(digest)
    return python


def _purelib(python: Path) -> str:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _call(*command: str) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)


def run(case: Case, arguments: list[str]) -> str | None:
    """Why the file failed; nothing if it passed."""
    try:
        python = prepare(case)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        why = "took too long" if isinstance(error, subprocess.TimeoutExpired) else f"ended with {error.returncode}"
        return f"its environment could not be made: {' '.join(error.cmd[1:5])} ... {why}"
    options = ["--confcutdir", str(FOLDER), str(FOLDER / f"test_{case.name}.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [str(python), "-m", "pytest", *options], env=environment, timeout=TEST_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"took more than {TEST_S} s"
    return None if done.returncode == 0 else f"pytest ended with {done.returncode}"


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, arguments = sys.argv[1:end], sys.argv[end + 1 :]
    parser = argparse.ArgumentParser(description="Tests against real packages, each file in an environment of its own.")
    parser.add_argument("names", nargs="*", help="NAME of test_NAME.py; none: all")
    os.chdir(ROOT)
    failed = 0
    chosen = cases(FOLDER, parser.parse_args(own).names)
    for case in chosen:
        began = time.monotonic()
        print(f"== {case.name}", flush=True)
        why = run(case, arguments)
        failed += why is not None
        print(f"== {case.name}: {'passed' if why is None else 'FAILED: ' + why} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
