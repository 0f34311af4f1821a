"""An installed wheel: what a stranger gets from it alone, and with one extra; and a wheel built from the sdist in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("build") is None:
    pytest.skip("run: make test-integrations ONLY=wheel", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RESHARD = """
import sys, asyncmoe.reshard, asyncmoe.reshard._C
names = {name.partition(".")[0] for name in sys.modules}
print(sorted(names & {"torch", "msgspec", "pydantic", "yaml", "typer", "zmq"}))
"""


def run(*command: object, cwd: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Without this checkout on the path, as a stranger's shell has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def done(*command: object, cwd: Path) -> str:
    found = run(*command, cwd=cwd)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git has, so that no leftover of a build is taken along."""
    folder = tmp_path_factory.mktemp("sources")
    listed = done("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    os.environ["ASYNCMOE_CUDA"] = "0"
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ".", cwd=sources)
    return out


def wheel(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def stranger(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and what it requires, far from the checkout."""
    home = tmp_path_factory.mktemp("stranger")
    done(sys.executable, "-m", "venv", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    done(python, "-m", "pip", "install", "--quiet", wheel(built), cwd=home)
    return python


def test_the_wheel_needs_numpy_only(stranger: Path) -> None:
    home = stranger.parents[2]
    listed = done(stranger, "-m", "pip", "list", "--format=freeze", cwd=home).lower()
    assert set(re.findall(r"^([\w-]+)==", listed, re.MULTILINE)) - {"pip", "setuptools"} == {"asyncmoe", "numpy"}
    assert done(stranger, "-c", RESHARD, cwd=home).strip() == "[]"


def test_help_is_helpful_and_every_command_names_its_extra(stranger: Path, tmp_path: Path) -> None:
    command = stranger.with_name("asyncmoe")
    told = done(command, "--help", cwd=tmp_path)
    assert f'{stranger} -m pip install "asyncmoe[train]"' in told
    assert "asyncmoe.reshard" in told
    assert done(command, cwd=tmp_path) == told
    assert done(command, "--version", cwd=tmp_path).startswith("asyncmoe 0")
    for name, extra in (("run", "train"), ("export", "train"), ("plan", "cli"), ("config", "cli"), ("show", "train")):
        refused = run(command, name, "x.yaml", cwd=tmp_path)
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1), refused
        assert refused.stderr.strip().endswith(f'run: {stranger} -m pip install "asyncmoe[{extra}]"')
        assert "make" not in refused.stderr


def test_the_small_extra_is_enough_for_commands_that_start_nothing(stranger: Path, tmp_path: Path) -> None:
    done(stranger, "-m", "pip", "install", "--quiet", "asyncmoe[cli]", cwd=tmp_path)
    command, demo = stranger.with_name("asyncmoe"), ROOT / "examples" / "demo.yaml"
    assert "digest" not in done(command, "config", "show", demo, cwd=tmp_path)
    assert '"$defs"' in done(command, "config", "schema", cwd=tmp_path)
    assert "trainer" in done(command, "plan", "--config", demo, cwd=tmp_path)
    assert "speed-up" in done(command, "simulate", cwd=tmp_path).lower()
    assert run(command, "doctor", cwd=tmp_path).stdout, "its checks fail here, but it says so line by line"
    for arguments in (("run", demo), ("make-model", "x")):
        refused = run(command, *arguments, cwd=tmp_path)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused
        assert 'pip install "asyncmoe[train]"' in refused.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_the_sdist_has_what_a_build_needs_and_the_wheel_no_leftovers(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md", "asyncmoe/build.py"} <= names
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")}
    assert wanted <= names
    ours = {name for name in done("git", "ls-files", "asyncmoe", cwd=ROOT).splitlines() if (ROOT / name).is_file()}
    assert {"asyncmoe/py.typed", "asyncmoe/reshard/_C.pyi"} <= ours
    with zipfile.ZipFile(wheel(built)) as archive:
        inside = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in inside if name.endswith(".dist-info/METADATA")]
    assert ours <= names
    assert ours <= set(inside), "stubs, templates and scripts are data of the package"
    for line in ("Requires-Python: >=3.11", "License-Expression: Apache-2.0", "Classifier: Typing :: Typed", "Provides-Extra: datasets"):
        assert line in metadata
    assert not [name for name in inside if not name.startswith(("asyncmoe/", "asyncmoe-"))]
    assert len([name for name in inside if "/_C." in name and name.endswith(".so")]) == 2
