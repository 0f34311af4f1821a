"""Messages for missing packages, and the declaration of all imports in pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from asyncmoe import installed
from tests.unit.source_imports import imported

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    **{"yaml": "pyyaml", "zmq": "pyzmq", "megatron": "megatron-core", "pydantic_core": "pydantic"},
    **{"jinja2": "transformers", "huggingface_hub": "transformers"},
}
"""Distribution of each module whose name differs, or that another distribution brings."""
SKINNY = {"mlflow": "mlflow-skinny"}
NOT_OURS = {"benchmarks", "mpi4py", "deep_ep"}
"""The checkout's own folder, what only examples of asyncmoe.reshard under mpirun use, and what Megatron uses where a user installed it."""


def extras() -> dict[str, set[str]]:
    """Normalised names of the distributions of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {name: {re.split(r"[\[<>=]", line)[0].strip().lower().replace("_", "-") for line in lines} for name, lines in project.items()}


def test_every_import_is_in_an_extra_that_pyproject_declares() -> None:
    ours = {module: extra for extra, modules in installed.EXTRAS.items() for module in modules}
    every = {name.split(".")[0] for path in (ROOT / "asyncmoe").rglob("*.py") for name in imported(path)}
    assert every - set(sys.stdlib_module_names) - NOT_OURS - {"asyncmoe", "numpy"} <= set(ours)
    declared = extras()
    for module, extra in ours.items():
        name = DISTRIBUTIONS.get(module, SKINNY.get(module, module)).replace("_", "-")
        assert name in declared[extra], f"{module} is said to come with {extra}"
    assert declared["cli"] <= declared["train"], "commands that start nothing work in a trainer's environment"


@pytest.mark.parametrize(
    ("module", "what", "extra"),
    [("typer", "asyncmoe run", "train"), ("yaml", "asyncmoe config", "cli"), ("plotly", "asyncmoe report", "report")],
)
def test_a_missing_module_is_one_line_with_the_extra(monkeypatch: pytest.MonkeyPatch, module: str, what: str, extra: str) -> None:
    monkeypatch.setattr(installed, "from_checkout", lambda: False)
    monkeypatch.setattr(installed, "has", lambda name: False)
    monkeypatch.setattr(sys, "argv", what.split())
    refused = installed.explained(ModuleNotFoundError(name=f"{module}.part"))
    assert (refused.what, refused.got) == (what, f"no module {module}")
    assert refused.hint == f'run: {sys.executable} -m pip install "asyncmoe[{extra}]"'


def test_a_module_of_the_user_and_one_that_is_there_keep_their_traceback() -> None:
    for error in (ModuleNotFoundError(name="my_rewards"), ModuleNotFoundError(name="torch.no_such"), ModuleNotFoundError()):
        assert installed.explained(error) is None


def test_make_setup_brings_the_extras_that_it_is_named_for() -> None:
    """The oracle is the lists that `make setup` installs from."""
    listed = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in ("train", "dev", "cpu", "engine-cpu-nodeps"))
    pinned = {line.split("==")[0].strip().lower().replace("_", "-") for line in listed.splitlines() if "==" in line}
    for extra, names in extras().items():
        if extra in installed.EXTRAS:
            assert (names - {"asyncmoe"} <= pinned) == (extra in installed._OF_SETUP), extra
