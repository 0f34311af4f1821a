"""Python arithmetic in bounded time and memory.

`ast` parses the expression and this module walks it; the interpreter itself evaluates nothing. Any call takes microseconds: length and
parentheses are bounded before parsing, and the size of a power before it is computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError, one_string

MAX_CHARACTERS = 1000
MAX_PARENTHESES = 50
MAX_DEPTH = 500
MAX_BITS = 4096
"""Maximum size of an integer; about 1,233 digits."""

_BINARY: dict[type[ast.operator], Callable[[int | float, int | float], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Calculator:
    """The tool "calculator"."""

    name = "calculator"
    description = "Computes an arithmetic expression of numbers, + - * / // % ** and parentheses."
    parameters = one_string("expression", 'such as "(12 + 7) * 3"')

    async def call(self, argument: str) -> str:
        """See `calculate`."""
        return calculate(argument)

    async def close(self) -> None:
        """See `Tool`."""


def calculate(expression: str) -> str:
    """Return the value of an expression as Python prints it.

    Raises:
        ToolError: `ERROR`: it is not an arithmetic expression, exceeds a bound, or has no finite real value.
    """
    try:
        return repr(_value(_parse(expression.strip()), 0))
    except ArithmeticError as error:
        raise _wrong(str(error)) from error


def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_CHARACTERS:
        raise _wrong(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    if expression.count("(") > MAX_PARENTHESES:
        raise _wrong(f"more than {MAX_PARENTHESES} parentheses")
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _wrong(f"cannot read {expression[:80]!r}") from error


def _value(node: ast.expr, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise _wrong(f"more than {MAX_DEPTH} nested operations")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, depth + 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(op, _value(left, depth + 1), _value(right, depth + 1))
        case _:
            raise _wrong(f"{type(node).__name__} is not arithmetic; allowed are numbers, + - * / // % ** and parentheses")


def _apply(op: ast.operator, left: int | float, right: int | float) -> int | float:
    both_whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and both_whole and abs(left) > 1 and right * math.log2(abs(left)) > MAX_BITS:
        raise _too_large()
    return _bounded(_BINARY[type(op)](left, right))


def _bounded(value: object) -> int | float:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise _too_large()
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise _wrong("the value is not a finite real number")
    return value


def _too_large() -> ToolError:
    return _wrong(f"a whole number of more than {MAX_BITS} bits")


def _wrong(detail: str) -> ToolError:
    return ToolError(ERROR, f"error: {detail}")
