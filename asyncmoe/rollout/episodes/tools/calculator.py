"""Python arithmetic in bounded time and memory.

`ast` parses the expression and this module walks it; the interpreter itself evaluates nothing. Any call takes microseconds: length and
parentheses are bounded before parsing, and the size of a power before it is computed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError

_CHARACTERS, _PARENTHESES = 1000, 50
_BITS = 4096
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


async def calculator(expression: str) -> str:
    """Computes an arithmetic expression of numbers, + - * / // % ** and parentheses, such as "(12 + 7) * 3"."""
    return calculate(expression)


def calculate(expression: str) -> str:
    """Return the value of an expression as Python prints it.

    Raises:
        ToolError: `ERROR`: it is not an arithmetic expression, exceeds a bound, or has no finite real value.
    """
    if len(expression) > _CHARACTERS or expression.count("(") > _PARENTHESES:
        raise _wrong(f"more than {_CHARACTERS} characters or {_PARENTHESES} parentheses")
    try:
        return repr(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _wrong(f"cannot read {expression[:80]!r}") from error
    except ArithmeticError as error:
        raise _wrong(str(error)) from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _apply(op, _value(left), _value(right))
        case _:
            raise _wrong(f"{type(node).__name__} is not arithmetic; allowed are numbers, + - * / // % ** and parentheses")


def _apply(op: ast.operator, left: int | float, right: int | float) -> int | float:
    both_whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(op, ast.Pow) and both_whole and abs(left) > 1 and right * math.log2(abs(left)) > _BITS:
        raise _wrong(f"a whole number of more than {_BITS} bits")
    return _bounded(_BINARY[type(op)](left, right))


def _bounded(value: object) -> int | float:
    if isinstance(value, int) and value.bit_length() <= _BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _wrong(f"the value is no finite real number, or a whole number of more than {_BITS} bits")


def _wrong(detail: str) -> ToolError:
    return ToolError(ERROR, f"error: {detail}")
