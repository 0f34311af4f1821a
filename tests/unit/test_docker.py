"""What of the images can be known without building them: instructions, commands, files, and what of a checkout must stay outside."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
files = pytest.mark.parametrize("file", FILES, ids=[path.name for path in FILES])


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, what follows it), in order; continued lines are one."""
    lines = [line for line in file.read_text().replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def left_out(path: str) -> bool:
    """Whether .dockerignore has a path or a folder above it: `**/` before a name is any folder, a name alone is one of the root."""
    parts = path.split("/")
    return any(
        fnmatch(part, pattern.removeprefix("**/")) for pattern in IGNORED for part in (parts if pattern.startswith("**/") else parts[:1])
    )


@files
def test_an_image_is_of_the_python_that_continuous_integration_tests(file: Path) -> None:
    told = instructions(file)
    assert [word for word, _ in told] == ["FROM", "RUN", "WORKDIR", "COPY", "RUN", "CMD"]
    tested = re.findall(r'python-version: "([\d.]+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert told[0][1] == f"python:{tested[0]}-slim-bookworm"


@files
def test_its_commands_are_those_of_the_makefile(file: Path) -> None:
    told = instructions(file)
    (arguments,) = [json.loads(rest) for word, rest in told if word == "CMD"]
    shell = [rest for word, rest in told if word == "RUN"]
    for command in shell:
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=10)
    made = [shlex.split(command) for command in shell if command.startswith("make ")] + [arguments]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [words[1] for words in made] == ["setup", "demo"]
    assert {words[1] for words in made} <= set(targets)
    gpu = file.name == "cuda.Dockerfile"
    assert all(("GPU=1" in words) is gpu for words in made)
    assert any("g++" in command and " make" in command for command in shell), "what requirements/check_python.py asks for"


@files
def test_the_command_on_top_builds_this_file(file: Path) -> None:
    (command,) = re.findall(r"^# (docker build .*)$", file.read_text(), re.MULTILINE)
    words = shlex.split(command)
    assert words[words.index("-f") + 1] == str(file.relative_to(ROOT))
    assert words[words.index("-t") + 1] == words[words.index("run", words.index("&&")) :][-3 if "make" in words else -1]
    assert "--shm-size" in command, "SGLang and weights in shared memory need more than docker's 64 MB"


def test_nothing_that_git_ignores_gets_into_an_image() -> None:
    for line in (ROOT / ".gitignore").read_text().splitlines():
        assert {line.rstrip("/"), f"**/{line.rstrip('/')}"} & set(IGNORED), f"{line}: the environment or the build of the host"
    assert {".git", ".venv*"} <= set(IGNORED)
    for path in (
        ".venv/bin/python",
        ".venv-engine/x",
        ".venv-integrations/wheel/x",
        "asyncmoe/reshard/_C.so",
        "runs/demo/x",
        "a/__pycache__/b.pyc",
    ):
        assert left_out(path), path


def test_everything_that_git_has_gets_into_an_image() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    assert [name for name in listed.stdout.splitlines() if left_out(name)] == []
