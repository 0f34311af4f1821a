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
FACTORS = {"%": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "百": 2, "千": 3, "万": 4, "亿": 8}
"""With their powers of ten."""


def known(name: str) -> Number | None:
    """Return the value of a unit, in any number or case; None: it is none that is known."""
    lower = name.lower()
    return next((UNITS[one] for one in (name, lower, lower.removesuffix("s"), lower.removesuffix("es")) if one in UNITS), None)
