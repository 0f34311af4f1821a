"""The bundle for GPU machines without a network: its calls carry what runs there, keep their limits, and continue where they ended."""

from __future__ import annotations

import ast
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.traces import covered
from tests.gpu.bundle import colocated, manifest, run, slim
from tests.gpu.bundle.parts import CALLS, LIMIT_S, Part
from tests.unit.source_imports import statements

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "tests" / "gpu" / "bundle"


def imported(file: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports anywhere; what it may do without, because it catches that it is missing, or imports for
    types only, is left out."""
    lines = [
        line for line in ast.parse(file.read_text()).body if not (isinstance(line, ast.If) and ast.unparse(line.test) == "TYPE_CHECKING")
    ]
    for node in statements(lines, tried=False):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def local_file(module: str) -> Path | None:
    """The file of a module of this tree; tests/unit and tests/native are on the path of tests/gpu."""
    for base in (ROOT, ROOT / "tests" / "unit", ROOT / "tests" / "native"):
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


def files_of(part: Part) -> list[Path]:
    """The files that a part starts with."""
    if part.module != "pytest":
        found = local_file(part.module)
        assert found, part.module
        return [found]
    return [ROOT / word for word in part.arguments if word.endswith(".py")]  # of tests/conftest.py they use no fixture


STARTED = {
    "offload": ("asyncmoe/trainer/model/optimizer.py",),
    "colocated": ("asyncmoe/trainer/__main__.py", "asyncmoe/rollout/controller.py", "asyncmoe/engines/engine_agent.py"),
}
"""What parts run in processes of their own."""


@pytest.mark.parametrize("call", CALLS)
def test_every_import_of_a_calls_parts_is_carried_or_the_machines(call: str) -> None:
    starts = [ROOT / "setup.py", *(file for part in CALLS[call] for file in files_of(part))]
    starts += [ROOT / name for part in CALLS[call] for name in STARTED.get(part.name, ())]
    there = manifest.ASSUMED | manifest.OPTIONAL
    # Reached through functions that the bundle does not call: the report, TensorBoard, sessions with MCP servers, a log in Redis, a sandbox
    # that is a server; where there is no server of SGLang, what asks one.
    reports = {"matplotlib", "plotly", "tensorboard", "mcp", "mcp_types", "httpx2", "anyio", "redis"}
    reports |= set() if "sglang" in manifest.CARRIED[call] else {"sglang"}
    found = reached(starts)
    missing = {name: str(file.relative_to(ROOT)) for name, file in found.items() if name not in there | reports}
    missing = {name: file for name, file in missing.items() if manifest.distribution(name) not in manifest.CARRIED[call]}
    assert missing == {}
    assert {"pybind11", "numpy"} <= set(found), "the walk sees what is imported through asyncmoe"


def test_the_five_calls_keep_their_limit_and_every_part_is_there() -> None:
    assert sum(part.limit_s for parts in CALLS.values() for part in parts if not part.asked) <= LIMIT_S
    page = (BUNDLE / "README.md").read_text()
    assert CALLS.keys() == manifest.CARRIED.keys()
    for parts in CALLS.values():
        names = [part.name for part in parts]
        assert names[:2] == ["facts", "build"]
        for part in parts:
            assert set(part.needs) <= set(names[: names.index(part.name)])
            assert f"`{part.name}`" in page
    own = [part.name for parts in CALLS.values() for part in parts if not part.again]
    assert len(own) == len(set(own)), "a summary has the parts of all calls"


# ---------------------------------------------------------------- one call


Call = Callable[..., tuple[object, list[str]]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a call whose parts start nothing: its exit status or last words, and the parts that it would have started."""

    def play(name: str, *words: str, commit: str = "c1", capability: str = "9.0", failing: str = "") -> tuple[object, list[str]]:
        ran: list[str] = []

        def start(part: Part, *_: object) -> run.Outcome:
            ran.append(part.name)
            facts = {"card": {"value": "a card"}, "capability": {"value": capability}}
            return run.Outcome("failed" if part.name == failing else "ok", figures=facts if part.name == "facts" else {})

        monkeypatch.setattr(run, "start", start)
        given = ["--call", name, "--commit", commit, "--work", str(tmp_path / "work"), *words, str(tmp_path / "results")]
        monkeypatch.setattr(sys, "argv", ["run.py", *given])
        try:
            return run.main(), ran
        except SystemExit as ended:
            return ended.code, ran

    return play


def test_a_call_continues_with_what_had_not_ended_well(call: Call, tmp_path: Path) -> None:
    assert call("updates", failing="graph") == (1, [part.name for part in CALLS["updates"] if not part.asked])
    assert call("two-processes") == (0, [part.name for part in CALLS["two-processes"]])
    assert call("updates") == (0, ["facts", "build", "graph"])
    assert call("updates", "--only", "sanitizer") == (0, ["facts", "build", "sanitizer"])
    said, ran = call("updates", commit="c2")
    assert "got results of commit c1, expected those of c2" in str(said)
    assert ran == []
    found = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert {"nccl", "graph", "bench", "sanitizer"} <= found["parts"].keys()
    assert (found["commit"], found["calls"].keys()) == ("c1", {"two-processes", "updates"})


def test_a_library_without_code_for_the_card_ends_a_call_before_anything_starts(call: Call) -> None:
    said, ran = call("two-processes", capability="10.0")
    assert str(said).startswith("two-processes: got a card of 10.0, expected sm_90, the only code that nvidia-nccl-cu13 ")
    assert ran == ["facts"]
    assert "graph" in call("updates", capability="10.0")[1]


# ---------------------------------------------------------------- slimmed libraries


def entry(architecture: int, code: bytes, header: int = 64) -> bytes:
    """Code as nvcc wraps it: kind, version, bytes of the header, bytes of the code, ..., the architecture at byte 28."""
    return struct.pack("<HHIQ12xI", 2, 0x101, header, len(code), architecture).ljust(header, b"h") + code


def library(*containers: tuple[bytes, ...]) -> bytes:
    """An ELF file of three sections: none, the names, and containers of entries eight bytes apart."""
    fat = b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, one))) + b"".join(one) + bytes(8) for one in containers)
    names = b"\0.shstrtab\0.nv_fatbin\0"
    sections = [(0, 0, 0), (1, 64, len(names)), (11, 64 + len(names), len(fat))]
    headers = b"".join(struct.pack("<II16xQQ24x", name, 1, start, size) for name, start, size in sections)
    head = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(names) + len(fat)) + bytes(10) + struct.pack("<HHH", 64, 3, 1)
    return head + names + fat + headers


def test_code_for_other_cards_becomes_zeros_and_nothing_moves() -> None:
    one, other, third = b"hopper**" * 9, b"blackwel" * 5, b"ampere**" * 3
    whole = library((entry(80, third), entry(90, one)), (entry(100, other), entry(90, one, header=80)))
    part = slim.slimmed(whole, 90)
    assert part == whole.replace(third, bytes(len(third))).replace(other, bytes(len(other)))
    assert part.count(one) == 2
    assert [architecture for architecture, *_ in slim.codes_of(part)] == [80, 90, 100, 90]


@pytest.mark.parametrize(("content", "said"), [(library((entry(80, b"ampere**"),)), r"got \[80\], expected some for 90"), (b"text", "ELF")])
def test_a_library_that_would_have_no_code_left_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        slim.slimmed(content, 90)


# ---------------------------------------------------------------- a colocated run's memory

MB = 1 << 20
ENGINE, PARAMETERS, STATE = 1000 * MB, 100 * MB, 300 * MB


def a_run(kept: int, grown: int) -> tuple[str, list[colocated.Sample], list[tuple[float, float]]]:
    """A controller's log, bytes in use, and when the trainer computed. Each state takes a second, and all switches have `grown` bytes more.

    Args:
        kept: bytes that a sleeping engine keeps.
    """
    turns = [*colocated.CYCLE[1:], *colocated.CYCLE * colocated.SWITCHES, *colocated.CYCLE[:4]]
    log, samples, trains = "", list[colocated.Sample](), list[tuple[float, float]]()
    used = {"generating": [ENGINE] * 4, "draining": [ENGINE] * 4, "asleep": [ENGINE, ENGINE, ENGINE, kept]}
    used |= {"training": [kept, *[kept + PARAMETERS + STATE] * 3], "waking": [ENGINE // 2 + PARAMETERS] * 4}
    for second, turn in enumerate(turns):
        log += f"{second:.6f} devices in turn: any, so {turn}\n{second:.6f} something else\n"
        samples += [(second + 0.2 * number, nbytes + (second + 1) // 5 * grown) for number, nbytes in enumerate(used[turn], 1)]
        trains += [(second + 0.25, second + 0.5)] if turn == "training" else []
    return log, samples, trains


@pytest.mark.parametrize(("kept", "grown", "healthy"), [(20 * MB, MB, True), (60 * MB, 0, False), (0, 9 * MB, False)])
def test_memory_that_is_not_given_back_or_grows_is_found(kept: int, grown: int, healthy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "CARD", True)
    log, samples, trains = a_run(kept, grown)
    figures = colocated.measured(colocated.stays(log, samples), ENGINE, PARAMETERS, STATE, trains)
    figures |= {"versions": (colocated.SWITCHES + 1, ""), "graphs": (1, "")}
    value = {name: figure for name, (figure, _) in figures.items()}
    assert value["given_back"] == 1 - kept / ENGINE
    assert [value[f"{name}_growth"] for name in colocated.GROWING] == [pytest.approx(grown, abs=1)] * 3
    assert (value["training_used"] - value["asleep_used"], value["asleep_first_used"]) == (PARAMETERS + STATE, kept)
    assert (value["draining"], value["load"], value["unload"]) == (1, pytest.approx(0.25), pytest.approx(0.5))
    assert (value["load_rate"], value["unload_rate"]) == (pytest.approx((PARAMETERS + STATE) / 0.25e9), pytest.approx(STATE / 0.5e9))
    assert (colocated.wrong(figures) == "") == healthy


# ---------------------------------------------------------------- traces


def test_time_with_a_kernel_counts_once_however_many_run() -> None:
    assert covered([(10, 5), (0, 2), (12, 1), (14, 3)]) == 2 + 7
    assert covered([]) == 0
