"""Settings all tests share, and which of them run only when asked for."""

from __future__ import annotations

import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from asyncmoe.errors import UserError

if TYPE_CHECKING:
    from asyncmoe.rollout.tokenizer import Tokenizer

settings.register_profile("repeatable", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every layout in every way, and other random cases in every run")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--thorough") else "repeatable")
    # A shell starts processes in the background with SIGINT ignored, and they pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    left = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests compare with transformers, which in one process with what is patched for Megatron computes something else."""
    compared = any(item.get_closest_marker("ranks") or "unit" in item.path.parts for item in session.items)
    if "megatron.core" in sys.modules and compared:
        raise pytest.UsageError("a test module imports Megatron; only the scripts of tests/ranks, tests/apart and tests/gpu may")


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether every layout is tried in every way."""
    return bool(pytestconfig.getoption("--thorough"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the policy that answers agents."""
    from tests.unit import openai_policy

    return openai_policy.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, which tests only read."""
    from asyncmoe.config.model import MadeModel
    from asyncmoe.models.make import make_model

    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, MadeModel(), seed=0)
    return path


@pytest.fixture
def session() -> str:
    """The name of a transfer that no other test shares."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started find modules of this checkout, as this one does."""
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.chdir(root)


@pytest.fixture
def engines_here() -> None:
    """Skip where there are no engines to be found, as in the environments of make test-python."""
    from asyncmoe.doctor.pythons import check_engine_python

    try:
        check_engine_python(None)
    except UserError as error:
        pytest.skip(str(error))
