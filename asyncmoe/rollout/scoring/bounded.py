"""Bounded arithmetic with numbers of 4096 bits; results that are too large, or sums that would lose a term, are refused.

The bounds are on bits, never on time, so that they are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mpmath.ctx_mp import MPContext

mp: Any = MPContext()
mp.prec = 4096
Number = Any
"""mp.mpf or mp.mpc."""
_SAME_BITS, _NOTHING_BITS = 2500, 3500
"""Numbers whose relative difference is below 2^-2500 are equal, which leaves room for cancellation; a sum below 2^-3500 is 0."""
_EXPONENT, _ARGUMENT, _FACTORIAL, _CHOSEN = 1 << 20, 1 << 500, 1 << 16, 1000
"""Bounds on an exponent to base 2; an angle, so that its sine keeps digits after cancellation; a factorial; a binomial coefficient."""


class TooLarge(Exception):
    """A number that is too large, or would absorb another one; a text that is too long or too nested."""


class Undefined(Exception):
    """An expression without a value."""


def need(condition: object, otherwise: type[Exception]) -> None:
    """Raise an error unless a condition holds."""
    if not condition:
        raise otherwise


def equal(a: Number, b: Number) -> bool:
    """Return whether two numbers are equal up to a relative difference."""
    return bool(a == b or (mp.isfinite(a) and mp.isfinite(b) and abs(a - b) <= mp.ldexp(max(abs(a), abs(b)), -_SAME_BITS)))


def integer(x: Number) -> int | None:
    """Return a number below 2^64 as an int if it is an integer, else None."""
    nearest = int(mp.nint(mp.re(x))) if mp.isfinite(x) and abs(x) < 1 << 64 else 0
    return nearest if equal(x, mp.mpf(nearest)) else None


def add(a: Number, b: Number) -> Number:
    """Return the sum. Raises TooLarge if the smaller number would be lost."""
    small, large = sorted((abs(a), abs(b)))
    need(small == 0 or not mp.isfinite(large) or small >= mp.ldexp(large, -_SAME_BITS), TooLarge)
    return _cleared(a + b, large if mp.isfinite(large) else mp.one)


def power(a: Number, b: Number) -> Number:
    """Return a to the power of b; an odd root of a negative number is the real one. Raises TooLarge or Undefined."""
    need(mp.isfinite(a) and mp.isfinite(b) and (a != 0 or mp.re(b) >= 0), Undefined)
    if a == 0 or b == 0:
        return mp.mpf(b == 0)
    need(abs(b) < _ARGUMENT and abs(b * mp.log(abs(a), 2)) < _EXPONENT, TooLarge)
    whole, root = integer(b), integer(1 / b)
    if whole is not None:
        return a**whole
    return -mp.power(-a, b) if root and root % 2 and mp.im(a) == 0 and mp.re(a) < 0 else mp.power(a, b)


def _natural(n: Number, bound: int) -> int:
    whole = integer(n)
    if whole is None or whole < 0:
        raise Undefined
    need(whole <= bound, TooLarge)
    return whole


def _binomial(n: Number, k: Number) -> Number:
    other = integer(n - k) or 0
    chosen = _natural(n - k if 0 < other < mp.re(k) else k, _CHOSEN)
    return mp.fprod((n - step) / (step + 1) for step in range(chosen))


def _cleared(x: Number, beside: Number = mp.one) -> Number:
    return mp.zero if abs(x) < mp.ldexp(beside, -_NOTHING_BITS) else x


def _turn(name: str, x: Number) -> Number:
    """Return the value of an mpmath function without traces of rounding: undefined at a pole, 0 at a root."""
    need(abs(x) < _ARGUMENT, TooLarge)
    found = getattr(mp, name)(x)
    need(abs(found) < mp.ldexp(1, _NOTHING_BITS), Undefined)
    return _cleared(found)


def _log(x: Number, base: Number = mp.e) -> Number:
    need(x != 0 and mp.isfinite(x) and base not in (0, 1), Undefined)
    return _cleared(mp.log(x)) / mp.log(base)


_OF_ANGLES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh"
TURNS: Mapping[str, Callable[..., Number]] = {
    **{name: partial(_turn, name.replace("arc", "a")) for name in _OF_ANGLES.split()},
    **{"ln": _log, "log": _log, "lg": partial(_log, base=mp.mpf(10)), "exp": partial(power, mp.e)},
}
"""Functions whose argument may follow without brackets."""
FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    **{"+": add, "*": lambda a, b: a * b, "^": power, "frac": lambda a, b: a * power(b, -mp.one), "brackets": lambda x: x},
    **{"binom": _binomial, "perm": lambda n, k: _binomial(n, k) * mp.factorial(k), "|": abs, "⌊": mp.floor, "⌈": mp.ceil, **TURNS},
    **{"sqrt": mp.sqrt, "!": lambda n: mp.factorial(_natural(n, _FACTORIAL)), "root": lambda n, x: power(x, power(n, -mp.one))},
}
"""Functions of the expression nodes that have a value, by name."""
