"""Units as numbers, by `units.txt`: two quantities are equal if their values are."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from asyncmoe.rollout.scoring.bounded import Number, mp


def _table() -> Mapping[str, Number]:
    values: dict[str, Number] = {"pi": +mp.pi}
    for line in files(__package__).joinpath("units.txt").read_text("utf-8").splitlines()[1:]:
        names, _, terms = line.partition(" = ")
        powers = (term.partition("^") for term in terms.split())
        value = mp.fprod((values.get(name) or mp.mpf(name)) ** int(power or 1) for name, _, power in powers)
        values |= dict.fromkeys(names.split(), value)
    return values


UNITS = _table()
_FACTORS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SIGNS = {"%": 1 / mp.mpf(100), "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
FACTORS: Mapping[str, Number] = _SIGNS | _FACTORS | {f"{name}s": value for name, value in _FACTORS.items()}


def known(name: str) -> Number | None:
    """Return the value of a unit, singular or plural, in any letter case that is not another unit's; None if it is unknown."""
    lower = name if len(name) == 1 or (len(name) == 2 and name[0] == "M") else name.lower()
    return next((UNITS[one] for one in (name, lower, lower.removesuffix("s"), lower.removesuffix("es")) if one in UNITS), None)


def unknown(name: str) -> str:
    """Return the name of an unknown unit in the singular, in lower case unless it looks like a symbol, such as mW and MHz."""
    return (name.lower() if len(name) > 2 and (name.istitle() or name.isupper()) else name).removesuffix("s")
