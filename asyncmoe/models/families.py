"""The registry of model families, each in its own file, and loading of the user's own families.

`model.family` travels with the model's configuration (`with_family`), so every process that lays out weights finds the same family, the
engines' workers included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from asyncmoe import plugins
from asyncmoe.errors import ConfigError, UserError, an
from asyncmoe.models import deepseek_v3, glm4_moe, llama, mixtral, qwen3, qwen3_moe
from asyncmoe.models.config_keys import FAMILY, misfits
from asyncmoe.models.family import Family
from asyncmoe.models.parallel import EngineParallel, MegatronParallel
from asyncmoe.models.shape import Shape

FAMILIES: Mapping[str, Family] = {
    model_type: family
    for family in (deepseek_v3.FAMILY, glm4_moe.FAMILY, llama.FAMILY, mixtral.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)
    for model_type in (family.name, *family.also)
}
"""Supported families by `model_type`."""
KEY = "model.family"


def with_family(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return a model's configuration with the family to use: "auto" or `package.module:name`."""
    return without_family(hf) if family == "auto" else {**hf, FAMILY: family}


def without_family(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as its checkpoint has it."""
    return {key: value for key, value in hf.items() if key != FAMILY}


def family_of(hf: Mapping[str, Any]) -> Family:
    """Return the family of a model.

    Raises:
        UserError: unsupported `model_type`.
        ConfigError: the user's own family cannot be imported, or is for another `model_type`.
    """
    kind = hf.get("model_type")
    if FAMILY in hf:
        return _own(hf[FAMILY], kind)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError("model_type in config.json", got=repr(kind), expected=" or ".join(sorted(FAMILIES)))
    return FAMILIES[kind]


def _own(target: str, kind: object) -> Family:
    found = load_own(target)
    if kind not in (found.name, *found.also):
        expected = f"a model_type that {target} supports ({' or '.join((found.name, *found.also))})"
        raise ConfigError(KEY, got=f"{target} for a model of model_type {kind!r}", expected=expected)
    return found


def load_own(target: str) -> Family:
    """Import the user's own family.

    Raises:
        ConfigError: it cannot be imported, or is no family.
    """
    forms, wanted = f"auto or {plugins.FORM}", "a Family that can be imported"
    found = plugins.load(target, KEY, forms=forms, wanted=wanted)
    if not isinstance(found, Family):
        raise ConfigError(KEY, got=f"{target}, {an(type(found).__name__)}", expected="an object of asyncmoe.models.Family")
    return found


def try_family(hf: Mapping[str, Any]) -> None:
    """Call every function of the user's own family on the model, and lay its weights out on one rank.

    Does nothing for a built-in family, nor for values of wrong kinds, which `Family.faults` names.

    Raises:
        ConfigError: a function raised an exception or returned a wrong type; names its file and line.
        LayoutError: the layouts are inconsistent.
    """
    if FAMILY not in hf or misfits(hf):
        return
    family, target = family_of(hf), hf[FAMILY]
    steps: Mapping[str, Callable[[], bool]] = {
        "shape_of": lambda: isinstance(family.shape_of(hf), Shape),
        "features": lambda: all(len(one) == 3 and isinstance(one[0], str) and isinstance(one[2], tuple) for one in family.features(hf)),
        "router": lambda: isinstance(cast(object, family.router(hf)), dict),
        "hf_names": lambda: bool(family.hf_layout(hf, "bfloat16").storages),
        "attention": lambda: bool(family.megatron_layout(hf, MegatronParallel(), 0, "bfloat16").storages and family.megatron_config(hf)),
        "engine": lambda: bool(family.sglang_layout(hf, EngineParallel(), 0, "bfloat16").storages and family.glued(hf) is not None),
    }
    name = ""
    try:
        with plugins.guarded(plugins.CALL_S):
            for name, step in steps.items():
                if not step():
                    expected = "the type that asyncmoe.models.Family documents"
                    raise ConfigError(KEY, got=f"a wrong type from {name} of {target}", expected=expected)
    except plugins.Failed as failed:
        got, expected = f"{failed} from {name} of {target}", "a result; it must not raise an exception, end the process or wait"
        raise ConfigError(KEY, got=got, expected=expected) from failed
