"""The bundle for GPU machines without a network: its manifest covers what runs there, its driver keeps time, its summary its schema."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.bundle import make, manifest, run, summary
from tests.gpu.bundle.parts import LIMIT_S, PARTS, Part
from tests.gpu.bundle.summary import Figure, Outcome, Summary
from tests.unit.source_imports import statements

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "tests" / "gpu" / "bundle"


def imported(file: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports anywhere; what it may do without, because it catches that it is missing, is left out."""
    for node in statements(ast.parse(file.read_text()).body, tried=False):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def local_file(module: str) -> Path | None:
    """The file of a module of this tree; tests/unit is on the path of tests/gpu."""
    for base in (ROOT, ROOT / "tests" / "unit"):
        place = base.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.exists():
                return file
    return None


def reached(starts: list[Path]) -> dict[str, Path]:
    """Top-level names outside this tree and the standard library that files import, or files they import -> who does."""
    found: dict[str, Path] = {}
    waiting, seen = list(starts), set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for module in imported(file):
            top = module.split(".")[0]
            for depth in range(1, module.count(".") + 2):
                if inside := local_file(".".join(module.split(".")[:depth])):
                    waiting.append(inside)
            if top not in sys.stdlib_module_names and top not in ("asyncmoe", "tests") and not local_file(top):
                found.setdefault(top, file)
    return found


def test_every_import_of_the_gpu_tests_is_carried_or_the_machines() -> None:
    starts = [*sorted((ROOT / "tests" / "gpu").rglob("*.py")), ROOT / "tests" / "conftest.py", ROOT / "setup.py"]
    starts += [
        ROOT / name
        for name in ("benchmarks/gpu.py", "benchmarks/replay.py", "asyncmoe/trainer/__main__.py", "asyncmoe/rollout/controller.py")
    ]
    there = manifest.ASSUMED | manifest.OPTIONAL
    # Reached through functions that the bundle does not call: the report, TensorBoard, sessions with MCP servers, a log in Redis.
    reports = {"matplotlib", "plotly", "tensorboard", "mcp", "mcp_types", "httpx2", "anyio", "redis"}
    found = reached(starts)
    missing = {name: str(file.relative_to(ROOT)) for name, file in found.items() if name not in there | reports}
    missing = {name: file for name, file in missing.items() if manifest.distribution(name) not in manifest.WHEELS}
    assert missing == {}
    assert {"pydantic", "msgspec", "megatron", "zmq"} <= set(found), "the walk sees what is imported through asyncmoe"


def test_wheels_are_pinned_and_never_hide_the_machines_own() -> None:
    pins = manifest.pins(ROOT)
    assert len(pins) == len(manifest.WHEELS) == len(set(manifest.WHEELS))
    assert not set(pins) & manifest.ASSUMED
    assert not any(name.startswith("nvidia") for name in pins)
    assert set(manifest.WITHOUT) <= set(pins)


def test_a_slim_wheel_has_all_but_what_is_left_out(tmp_path: Path) -> None:
    whole, target = tmp_path / "sglang-1-py3-none-any.whl", tmp_path / "out.whl"
    kept, left = ["sglang/srt/server.py", "sglang-1.dist-info/METADATA"], ["sglang/multimodal_gen/a.py", "sglang/srt/rust_extensions/_s.so"]
    with zipfile.ZipFile(whole, "w") as wheel:
        for name in (*kept, *left):
            wheel.writestr(name, name)
    make.slim(whole, target)
    with zipfile.ZipFile(target) as wheel:
        assert wheel.namelist() == kept
        assert wheel.read(kept[0]).decode() == kept[0]


def test_wheels_are_unpacked_and_torch_is_refused(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/__init__.py", "")
        wheel.writestr("thing-1.data/purelib/deep/more.py", "")
        wheel.writestr("thing-1.data/scripts/thing", "")
    assert run.unpack(wheels, site).status == "ok"
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()) == ["deep/more.py", "thing/__init__.py"]
    (wheels / "torch-2.0-cp312-cp312-linux_x86_64.whl").touch()
    assert run.unpack(wheels, site).status == "failed"


def test_wheels_that_are_missing_or_damaged_are_said(tmp_path: Path) -> None:
    assert "got no wheels" in run.unpack(tmp_path, tmp_path / "site").reason
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 cut")
    assert "one-1.0-py3-none-any.whl: got a damaged wheel" in run.unpack(tmp_path, tmp_path / "site").reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "grph"], "--only: got grph, expected some of facts, build"),
        (["--times", "-1"], "--times: got -1.0, expected a positive number"),
        (["--wheels", "none"], "got no wheels" if sys.version_info[:2] == (3, 12) else "expected 3.12"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    program = [
        sys.executable,
        str(ROOT / "tests/gpu/bundle/run.py"),
        "--work",
        str(tmp_path / "work"),
        *arguments,
        str(tmp_path / "results"),
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bundle_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    maker = tmp_path / "tests" / "gpu" / "bundle"
    shutil.copytree(ROOT / "tests" / "gpu" / "bundle", maker)
    for package in (tmp_path / "tests", tmp_path / "tests" / "gpu"):
        (package / "__init__.py").touch()
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    done = subprocess.run(
        [sys.executable, str(maker / "make.py"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 1
    assert "expected a git checkout, a package registry and a folder" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_whole_is_under_eleven_minutes_and_every_part_is_there() -> None:
    assert sum(part.limit_s for part in PARTS) < LIMIT_S < 660
    names = [part.name for part in PARTS]
    assert len(names) == len(set(names))
    for part in PARTS:
        assert set(part.needs) <= set(names[: names.index(part.name)])
        assert local_file(part.module), part.module
    page = (BUNDLE / "README.md").read_text()
    assert all(f"`{name}`" in page for name in names)


def test_the_script_is_clean() -> None:
    script = BUNDLE / "run.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", script], check=False).returncode == 0
    text = script.read_text()
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in text


def outcome_of(code: str, tmp_path: Path, left_s: float = 20.0) -> Outcome:
    module = tmp_path / "part_of_a_test.py"
    module.write_text(f"import json, sys, time\nfrom pathlib import Path\nresult = Path(sys.argv[1])\n{code}\n")
    part = Part("part", 20, "part_of_a_test")
    return run.start(part, left_s, tmp_path, tmp_path, {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"})


def test_parts_end_as_they_say(tmp_path: Path) -> None:
    written = 'result.write_text(json.dumps({"skipped": %r, "figures": {"n": {"value": 1, "unit": "GB/s"}}}))'
    good = outcome_of(written % "", tmp_path)
    assert (good.status, good.figures) == ("ok", {"n": Figure(1, "GB/s")})
    skipped = outcome_of(written % "no card", tmp_path)
    assert (skipped.status, skipped.reason) == ("skipped", "no card")
    failed = outcome_of(f"{written % ''}; sys.exit('the cause')", tmp_path)
    assert (failed.status, failed.reason, failed.figures) == ("failed", "the cause", {"n": Figure(1, "GB/s")})


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    start = "import subprocess; child = subprocess.Popen(['sleep', '1234.5'])"
    child = f"{start}; result.with_suffix('.pid').write_text(str(child.pid)); time.sleep(60)"
    hung = outcome_of(child, tmp_path, left_s=1.5)
    assert hung.status == "failed"
    assert "still running after" in hung.reason
    pid = (tmp_path / "part.pid").read_text()
    until = time.monotonic() + 10.0  # a kill returns before the kernel has ended everyone
    while not _ended(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert _ended(pid)


def _ended(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_parts_are_skipped_for_a_reason() -> None:
    found = Summary("2026-11-22", "c", LIMIT_S)
    found.parts["build"] = Outcome("failed", "no compiler")
    part = Part("bench", 1, "m")
    assert run.reason_to_skip(part, found) == Outcome("skipped", "build did not end well", limit_seconds=1)
    found.parts["build"] = Outcome("ok")
    assert run.reason_to_skip(part, found) == Outcome("skipped", "no GPU here", limit_seconds=1)
    found.machine["card"] = "a card"
    assert run.reason_to_skip(part, found) is None


def test_a_summary_is_as_its_schema_says(tmp_path: Path) -> None:
    found = Summary("2026-11-22", "c", LIMIT_S)
    found.parts["bench"] = Outcome("ok", figures={"pack_share": Figure(0.9, "of a device copy")})
    found.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert summary.problems(written) == []
    assert written["parts"]["bench"]["figures"]["pack_share"]["value"] == 0.9
    written["parts"]["bench"] = {"status": "failed", "reason": "", "figures": {"x": {"value": 1}}}
    del written["machine"]["torch"]
    assert len(summary.problems(written)) == 3


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").glob("bundle-*.json")), ids=lambda file: file.name)
def test_committed_summaries_are_as_the_schema_says(file: Path) -> None:
    assert summary.problems(json.loads(file.read_text())) == []
