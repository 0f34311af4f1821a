"""Command-line syntax for the sizes of a trainer, of engines and of an adapter."""

from __future__ import annotations

import re
from typing import Any

from asyncmoe.config.loading import section
from asyncmoe.config.lora import LoraSection
from asyncmoe.errors import ConfigError
from asyncmoe.models import EngineParallel, MegatronParallel
from asyncmoe.models.lora import halves
from asyncmoe.models.lora.adapter import Kind, kind_of
from asyncmoe.models.shape import Shape
from asyncmoe.reshard.layout import ITEM_BYTES

TRAINER = {key: key for key in ("tp", "pp", "ep", "etp", "dp", "vpp")} | {"first": "first_layers", "last": "last_layers"}
"""Field of MegatronParallel by command-line key."""
CONTEXT = "cp"
"""Command-line key of the context-parallel ranks, which MegatronParallel counts as data-parallel ones."""
_ENGINES = re.compile(r"(?P<engines>\d{1,9})xtp(?P<tp>\d{1,9})(?:ep(?P<ep>\d{1,9}))?(?:dp(?P<dp>\d{1,9}))?(?:pp(?P<pp>\d{1,9}))?", re.ASCII)
ENGINE = ("tp", "ep", "dp", "pp")
"""Fields of EngineParallel, in command-line order."""


def parse_trainer(text: str) -> MegatronParallel:
    """Parse `tp=2,pp=2,ep=8,dp=4`; a missing size is 1. `vpp=2`: two model chunks per stage. `first=3`, `last=5`: layers of the first and
    last pipeline stage. `te` without a value: Transformer Engine's parameter names. `cp=2`: twice as many ranks, which count as
    data-parallel ones; `context_ranks` returns it.

    Raises:
        ConfigError: any other syntax, or incompatible sizes.
    """
    sizes, te = _parsed(text)
    cp = sizes.pop(CONTEXT, 1)
    return MegatronParallel(te=te, **{**sizes, "dp": sizes.get("dp", 1) * cp})


def context_ranks(text: str) -> int:
    """Return the context-parallel ranks of the text that `parse_trainer` takes, and which it counts as data-parallel ones.

    Raises:
        ConfigError: as `parse_trainer`, for the syntax.
    """
    return int(_parsed(text)[0].get(CONTEXT, 1))


def _parsed(text: str) -> tuple[dict[str, Any], bool]:
    sizes: dict[str, Any] = {}
    te = False
    known = {**TRAINER, CONTEXT: CONTEXT}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key == "te" and not value:
            te = True
        elif key not in known or known[key] in sizes or not re.fullmatch("[0-9]{1,9}", value):
            raise ConfigError("--trainer", got=repr(part), expected=f"sizes like tp=2,pp=2,ep=8,dp=4 (each of {', '.join(known)} once)")
        else:
            sizes[known[key]] = int(value)
    if sizes.get(CONTEXT, 1) < 1:
        raise ConfigError(f"parallel size {CONTEXT}", got=sizes[CONTEXT], expected="at least 1")
    return sizes, te


def parse_engines(text: str) -> tuple[int, EngineParallel]:
    """Parse `4xtp8` or `4xtp8ep2dp2pp2`: the number of engines, and each one's sizes (tensor, expert, data-parallel attention, pipeline).

    Raises:
        ConfigError: any other syntax, or incompatible sizes.
    """
    found = _ENGINES.fullmatch(text.strip())
    if not found or int(found["engines"]) < 1:
        raise ConfigError("--engines", got=repr(text), expected="engines x sizes, like 4xtp8, 16xtp8ep8 or 2xtp8ep8dp8pp2")
    sizes: dict[str, Any] = {key: int(found[key] or 1) for key in ENGINE}
    return int(found["engines"]), EngineParallel(**sizes)


def check_dtype(dtype: str) -> None:
    """Raise ConfigError if no weights have this dtype."""
    weights = [name for name in ITEM_BYTES if "float" in name]
    if dtype not in weights:
        raise ConfigError("--dtype", got=repr(dtype), expected=f"one of {', '.join(weights)}")


def trainer_text(parallel: MegatronParallel, cp: int = 1) -> str:
    """Return the inverse of `parse_trainer`, without sizes at their default.

    Args:
        cp: context-parallel ranks, which `parallel` counts as data-parallel ones.
    """
    plain, given = MegatronParallel(), {**vars(parallel), "dp": parallel.dp // cp}
    values = {key: (given[field], getattr(plain, field)) for key, field in TRAINER.items()}
    values |= {CONTEXT: (cp, 1)}
    sizes = [f"{key}={value}" for key, (value, usual) in values.items() if value != usual]
    return ",".join([*sizes, *(["te"] if parallel.te else [])]) or "tp=1"


def engines_text(count: int, parallel: EngineParallel) -> str:
    """Return the inverse of `parse_engines`."""
    sizes = [f"{key}{getattr(parallel, key)}" for key in ENGINE if key == "tp" or getattr(parallel, key) > 1]
    return f"{count}x{''.join(sizes)}"


def parse_adapter(text: str, m: Shape) -> Kind:
    """Parse `rank=32` or `rank=32,experts=shared_outer,targets=q_proj+v_proj`; the default is all targets of the model.

    Raises:
        ConfigError: any other syntax, or a value that the section `lora` of a configuration refuses.
    """
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if not given.keys() <= {"rank", "experts", "targets"} or "rank" not in given or len(given) <= text.count(","):
        raise ConfigError("--lora", got=repr(text), expected="rank=32, and experts=shared_outer or targets=q_proj+v_proj if wanted")
    values: dict[str, Any] = {**given, "targets": given["targets"].split("+")} if "targets" in given else given
    kind = kind_of(section(LoraSection, values, "lora"), m)
    halves.check(kind, m)
    return kind
