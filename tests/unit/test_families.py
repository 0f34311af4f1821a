"""A family that is registered is tried everywhere: in layouts, on Megatron's ranks, in engines and whole runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from model_cases import MODELS

from asyncmoe.models import FAMILIES
from tests import family_models
from tests.ranks import case

LISTS: dict[str, tuple[Mapping[str, dict[str, Any]], Iterable[str]]] = {
    "tests/unit/model_cases.py: MODELS": (MODELS, ()),
    "tests/ranks/case.py: VARIANTS": (case.VARIANTS, ()),
    "tests/family_models.py: MODELS": (family_models.MODELS, family_models.ELSEWHERE),
}


@pytest.mark.parametrize("name", LISTS)
def test_every_family_is_tried(name: str) -> None:
    models, elsewhere = LISTS[name]
    listed = {model["model_type"] for model in models.values()}
    registered = {family.name for family in FAMILIES.values()}
    assert listed.isdisjoint(elsewhere)
    assert listed | set(elsewhere) == registered, f"add a small model of each family to {name}"
