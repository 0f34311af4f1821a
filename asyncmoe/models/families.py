"""The registry of model families; each family has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncmoe.errors import UserError
from asyncmoe.models import deepseek_v3, glm4_moe, mixtral, qwen3, qwen3_moe
from asyncmoe.models.family import Family

FAMILIES: Mapping[str, Family] = {
    model_type: family
    for family in (deepseek_v3.FAMILY, glm4_moe.FAMILY, mixtral.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)
    for model_type in (family.name, *family.also)
}
"""Supported families by `model_type`."""


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a model.

    Raises:
        UserError: unsupported `model_type`.
    """
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError("model_type in config.json", got=repr(kind), expected=" or ".join(sorted(FAMILIES)))
    return FAMILIES[kind]
