"""Python arithmetic in bounded time and memory.

`ast` parses the expression and this module walks it; the interpreter itself evaluates nothing. Any call takes microseconds: length and
parentheses are bounded before parsing, and the size of a power before it is computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float
_CHARACTERS, _PARENTHESES = 1000, 50
_BITS = 4096
"""Maximum size of an integer; about 1,233 digits."""
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


async def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and parentheses, such as "(12 + 7) * 3"."""
    if len(expression) > _CHARACTERS or expression.count("(") > _PARENTHESES:
        raise ValueError(f"more than {_CHARACTERS} characters or {_PARENTHESES} parentheses")
    return repr(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> Number:
    """Return the value of an expression, as Python computes it. Raises ValueError or ArithmeticError if it is not finite, not real, or
    exceeds a bound."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            base, other = _value(left), _value(right)
            whole = isinstance(base, int) and isinstance(other, int) and abs(base) > 1
            if isinstance(op, ast.Pow) and whole and other * math.log2(abs(base)) > _BITS:
                raise ValueError(f"a whole number of more than {_BITS} bits")
            return _bounded(_BINARY[type(op)](base, other))
        case _:
            raise ValueError(f"{type(node).__name__} is not arithmetic; allowed are numbers, + - * / // % ** and parentheses")


def _bounded(value: object) -> Number:
    if (isinstance(value, int) and value.bit_length() <= _BITS) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"the value is no finite real number, or a whole number of more than {_BITS} bits")
