"""Tools answer, fail under a reason, or are cut off; nothing a model writes takes unbounded time or memory."""

from __future__ import annotations

import ast
import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError
from asyncmoe.process import wait_until
from asyncmoe.rollout.episodes.tools import loading
from asyncmoe.rollout.episodes.tools.calculator import calculator
from asyncmoe.rollout.episodes.tools.calls import MAX_CALLS, find
from asyncmoe.rollout.episodes.tools.function import Function
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError, read_arguments

pytestmark = pytest.mark.usefixtures("importable")
FUNCTIONS = "tests.unit.tool_functions"
NUMBERS = st.one_of(st.integers(0, 10**6).map(str), st.floats(0, 1e6, allow_nan=False, allow_infinity=False).map(repr))


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from([" + ", "-", "*", " / ", "//", " % "])
    binary = st.tuples(inner, operators, inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})")
    power = st.tuples(inner, st.integers(0, 9)).map(lambda parts: f"({parts[0]})**{parts[1]}")
    return st.one_of(binary, power, inner.map(lambda text: f"-{text}"), inner.map(lambda text: f"+({text})"))


def calculate(expression: str) -> str:
    return asyncio.run(calculator(expression))


@given(st.recursive(NUMBERS, joined, max_leaves=12))
def test_the_calculator_agrees_with_python(expression: str) -> None:
    try:
        expected = repr(eval(compile(ast.parse(expression, mode="eval"), "", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, ValueError):
        expected = "refused"
    try:
        value = calculate(expression)
    except (ArithmeticError, ValueError) as error:
        # What is in between may be beyond the bounds where what is at the end is not.
        value = expected if any(word in str(error) for word in ("bits", "parentheses")) else "refused"
    assert value == expected


BOMBS = ["9**9**9**9", "-9**-9**9**9", "(" * 990, "-" * 990 + "1", "9" * 2000, "((9**999)**999)**999", "1.5**99999999", "1e999"]


@pytest.mark.parametrize("expression", [*BOMBS, "(-8)**0.5", "1/0", "", "x", "f(1)", "'a'*9", "True", "[1]", "1<2", "1;2", "1\x00", "~1"])
def test_what_the_calculator_refuses(expression: str) -> None:
    with pytest.raises((ArithmeticError, ValueError, SyntaxError, MemoryError, RecursionError)):
        calculate(expression)


def test_the_calculator_keeps_whole_numbers_whole_and_takes_long_sums() -> None:
    assert calculate(" 2**100 ") == "1267650600228229401496703205376"
    assert calculate("+".join(["1"] * 400)) == "400"
    assert calculate("1**" + "9" * 300) == "1"


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
READ = ("calculator", '{"expression": "1+2"}')


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", "no call, only [text] and </tool_call>", []),
        ("hermes", f"let me see {CALL} so", [READ]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', [None]),
        ("hermes", '<tool_call>["f"]</tool_call>' + CALL, [None, READ]),
        ("hermes", "<tool_call>" + "[" * 60000 + "</tool_call>", [None]),
        ("hermes", CALL * 40, [READ] * MAX_CALLS),
        ("hermes", f"a <mm:think> {CALL}", []),
        ("hermes", f"{CALL} begun in the prompt </think> so {CALL}", [READ]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>é"}}</tool_call>' + CALL, [("f", '{"a": "<think>é"}'), READ]),
        ("brackets", "[THINK][1+1][/THINK][2+2]", [(None, "2+2")]),
        ("brackets", "12+7=[12+7]", [(None, "12+7")]),
        ("brackets", "[calculator: 12+7] [get-sum:1]", [("calculator", "12+7"), ("get-sum", "1")]),
        ("brackets", "[]", [None]),
        ("brackets", "[1\n2]", [None]),
        ("brackets", "[a[0]]", [None]),
        ("brackets", "[12+", [None]),
        ("brackets", CALL, []),
    ],
)
def test_calls_are_found(style: str, text: str, expected: list[tuple[str | None, str] | None]) -> None:
    assert [None if call.wrong else (call.name, call.arguments) for call in find(text, style)] == expected


@given(
    st.lists(st.sampled_from([*"[]:\n{}a1", "<tool_call>", "</tool_call>"]), max_size=60).map("".join),
    st.sampled_from(["hermes", "brackets"]),
)
def test_any_text_is_taken_apart_in_order(text: str, style: str) -> None:
    found = find(text, style)
    bounds = [bound for call in found for bound in (call.start, call.end)]
    assert bounds == sorted(bounds)
    assert all(text[call.start :].startswith(("[", "<tool_call>")) for call in found)
    assert all(len(call.wrong) < 300 for call in found)


TEXT, NUMBER = {"type": "string"}, {"type": "number"}


@pytest.mark.parametrize(
    ("properties", "text", "read"),
    [
        ({"a": TEXT}, '{"b": "c"}', {"b": "c"}),
        ({"a": TEXT}, "NaN", {"a": "NaN"}),
        ({"a": TEXT}, "12", {"a": "12"}),
        ({"a": NUMBER}, "12", {"a": 12}),
        ({"a": NUMBER, "b": NUMBER}, '{"a": "\\ud83d\\ude00", "b": 1e300}', {"a": "\U0001f600", "b": 1e300}),
        ({}, "{}", {}),
        ({"a": NUMBER, "b": NUMBER}, "plain words", None),
        *(({"a": NUMBER}, bad, {"a": bad}) for bad in ('{"a": "\\ud800"}', "NaN", '{"a": {"b": [1, 1e400]}}', "[" * 60000)),
    ],
)
def test_the_text_of_a_call_becomes_arguments(properties: dict[str, Any], text: str, read: dict[str, Any] | None) -> None:
    with pytest.raises(ToolError, match="tool_error") if read is None else nullcontext():
        assert read_arguments(text, "f", {"properties": properties}) == read


def test_concurrency_is_bounded_and_waiting_is_no_time_out() -> None:
    running, most = 0, 0

    async def slow(arguments: object) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(0.01)
        finally:
            running -= 1
        return ""

    async def run() -> Runner:
        runner = Runner("slow", "", {}, slow, ToolLimits(timeout_s=0.2, concurrency=2))
        call = asyncio.create_task(runner.call("{}"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.gather(*(runner.call("{}") for _ in range(60)))
        return runner

    assert (asyncio.run(run()).counts.calls, most) == (60, 2)


def ask(name: str, texts: list[str], **options: float) -> tuple[list[str], Runner]:
    """Each observation, or the reason why there is none; one after the other."""

    async def run() -> tuple[list[str], Runner]:
        (runner,) = loading.load([name], {name.rpartition(":")[2]: options} if options else None).values()
        found = []
        try:
            for text in texts:
                try:
                    found.append(await runner.call(text))
                except ToolError as error:
                    found.append(f"{error.reason}: {error.detail}")
        finally:
            await runner.close()
        return found, runner

    return asyncio.run(run())


def test_a_tool_is_loaded_by_name_and_counts() -> None:
    found, runner = ask("calculator", ["1+2", "x", "2*3"])
    assert found[::2] == ["3", "6"]
    assert found[1].startswith("tool_error: error: ValueError: ")
    assert (runner.counts.calls, dict(runner.counts.failures)) == (3, {"tool_error": 1})
    assert runner.schema["function"]["parameters"]["properties"].keys() == {"expression"}


@pytest.mark.parametrize("name", ["shout", "shout_later"])
def test_a_users_function(name: str) -> None:
    found, runner = ask(f"{FUNCTIONS}:{name}", ["ab", "raise", "refuse", "number", "flood", "é\n"], characters=100)
    assert found[:3] == ["AB", "tool_error: error: ValueError: no such thing", "tool_error: do not ask"]
    assert found[3].startswith("tool_crash")
    assert found[4].startswith("tool_flood: " + "X" * 100)
    assert len(found[4]) < 200
    assert found[5] == "É\n"
    assert runner.counts.calls == 6


def test_a_function_that_hangs_or_dies_costs_its_own_call_only_and_nothing_is_left() -> None:
    found, runner = ask(f"{FUNCTIONS}:shout", ["process", "process", "hang", "exit", "process", "fork"], timeout_s=3.0)
    assert found[0] == found[1] != found[4]
    assert [text.partition(":")[0] for text in found[2:4]] == ["tool_timeout", "tool_crash"]
    assert runner.counts.seconds >= 3.0
    for process in (found[0], found[4], found[5]):
        stat = Path(f"/proc/{process}/stat")
        assert wait_until(lambda stat=stat: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", 10)  # type: ignore[misc]
    assert ask(f"{FUNCTIONS}:shout_later", ["hang", "ab"], timeout_s=0.2)[0][1] == "AB"


def test_a_signature_and_a_docstring_become_a_schema() -> None:
    (flight,) = loading.load([f"{FUNCTIONS}:find_flight"]).values()
    assert flight.schema["function"] == {
        "name": "find_flight",
        "description": "Finds a flight from an airport.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "required": ["origin", "day"],
            "properties": {
                "origin": {"type": "string"},
                "day": {"type": "integer", "description": "of the year"},
                "copy": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}], "default": None},
                "cabin": {"type": "string", "enum": ["economy", "first"], "default": "economy"},
            },
        },
    }
    assert Function(f"{FUNCTIONS}:untyped").parameters["properties"] == {"anything": {"type": "string"}}


def test_calls_are_checked_and_converted() -> None:
    flight = Function(f"{FUNCTIONS}:find_flight")
    assert flight.run({"origin": "é", "day": 3, "copy": ["a"]}) == "'é' 4 ['a'] economy"
    assert flight.run({"origin": "B", "day": "4", "cabin": "first"}) == "'B' 5 None first"
    good = {"origin": "B", "day": 1}
    for wrong, named in (({"day": None}, "day"), ({"day": 1.5}, "day"), ({"cabin": "third"}, "cabin"), ({"_x": 2}, "_x")):
        with pytest.raises(ToolError, match=f"^tool_error: error: {named}: "):
            flight.run(good | wrong)


SHOUT = f"{FUNCTIONS}:shout"


@pytest.mark.parametrize(
    ("names", "options", "what", "got"),
    [
        (["abacus"], {}, "names", "abacus"),
        ([f"{FUNCTIONS}:nothing"], {}, "names", "nothing"),
        ([f"{FUNCTIONS}:NUMBER"], {}, "names", "an integer"),
        ([f"{FUNCTIONS}:anything"], {}, "names", "anything"),
        ([f"{FUNCTIONS}:mystery"], {}, "names", "mystery"),
        ([f"{FUNCTIONS}:cached"], {}, "names", "cached"),
        (["calculator", "calculator"], {}, "names", "two tools named calculator"),
        ([SHOUT], {"shuot": {}}, "options.shuot", "no such tool"),
        ([SHOUT], {"shout": {"timeout": 3}}, "options.shout.timeout", "an unknown key"),
        (["calculator"], {"calculator": {"timeout_s": -1}}, "options.calculator.timeout_s", "-1"),
        (["python"], {"python": {"seconds": 3}}, "options.python.seconds", "an unknown key"),
    ],
)
def test_what_cannot_be_loaded(names: list[str], options: dict[str, dict[str, float]], what: str, got: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loading.load(names, options)
    assert refused.value.what == f"environment.tools.{what}"
    assert got in str(refused.value.got)
