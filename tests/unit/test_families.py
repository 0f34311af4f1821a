"""A registered family is tested everywhere: in layouts, on Megatron's ranks, in engines and whole runs."""

from __future__ import annotations

import ast
from pathlib import Path

import asyncmoe
from asyncmoe.models import FAMILIES
from tests import families


def test_every_family_has_a_small_model() -> None:
    listed = {model["model_type"] for model in families.MODELS.values()}
    assert listed == {family.name for family in FAMILIES.values()}, "add a small model of each family to tests/families.py"


def test_nothing_asks_for_a_family_by_its_name() -> None:
    """Only its own file has it, what makes models, and what knows SGLang's parsers, one of which is named like a family."""
    package = Path(asyncmoe.__file__).parent
    made = [package / "models" / "make.py", package / "config" / "tool_parsers.py"]
    made.append(package / "rollout" / "episodes" / "tools" / "calls.py")
    said = {
        (path.name, node.value)
        for path in package.rglob("*.py")
        if path not in made
        if any(name in (text := path.read_text()) for name in FAMILIES)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    }
    assert said == {(f"{family.name}.py", name) for name, family in FAMILIES.items()}
