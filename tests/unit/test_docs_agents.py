"""docs/guides/agents.md: its table counts the lines of its functions, and its YAML is configuration.

The functions themselves run with the real packages: tests/integrations/test_frameworks.py and test_coding.py.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec

import pytest
import yaml

from asyncmoe.config import parse
from asyncmoe.errors import UserError
from asyncmoe.rollout.tasks import own
from tests.unit import doc_pages

PAGE = doc_pages.read("guides/agents.md")


def lines(function: ast.AsyncFunctionDef) -> int:
    """Lines of a function's body without its docstring and empty lines."""
    body = function.body[1:]
    assert isinstance(function.body[0], ast.Expr)
    return len([line for line in ast.unparse(body).splitlines() if line.strip()])


@pytest.mark.parametrize("name", ["solve", "graph", "codex"])
def test_the_table_counts_lines(name: str) -> None:
    functions = [
        one for text in doc_pages.files(PAGE).values() for one in ast.walk(ast.parse(text)) if isinstance(one, ast.AsyncFunctionDef)
    ]
    (found,) = [one for one in functions if one.name == name]
    (row,) = [row for row in doc_pages.tables(PAGE)[0] if row[-1] == f"`{name}`"]
    assert row[1] == str(lines(found))


def test_an_environment_of_verifiers_is_configured() -> None:
    (block,) = doc_pages.blocks(PAGE, "yaml")
    config = parse({"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, **yaml.safe_load(block.text)})
    assert config.task.kind.startswith("asyncmoe.rollout.adapters.verifiers:")
    assert config.environment.agent == "asyncmoe.rollout.adapters.verifiers:rollout"


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed; tests/integrations tries it")
def test_a_task_without_the_package_is_refused_in_one_line() -> None:
    (block,) = doc_pages.blocks(PAGE, "yaml")
    options = yaml.safe_load(block.text)["task"]["options"]
    with pytest.raises(UserError, match=r"the package verifiers: got none, expected it .* run: \S+ -m pip install \"verifiers>=") as caught:
        own.load("asyncmoe.rollout.adapters.verifiers:Examples", options, "task")
    assert "\n" not in str(caught.value)
