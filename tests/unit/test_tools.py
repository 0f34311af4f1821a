"""Tools answer, fail under a reason, or are cut off; nothing a model writes takes unbounded time or memory."""

from __future__ import annotations

import ast
import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.errors import ConfigError
from asyncmoe.rollout.episodes.tools import loading
from asyncmoe.rollout.episodes.tools.calculator import calculate
from asyncmoe.rollout.episodes.tools.calls import MAX_CALLS, Call, Malformed, Style, find
from asyncmoe.rollout.episodes.tools.runner import Runner, ToolLimits
from asyncmoe.rollout.episodes.tools.tool import ToolError, schema

FUNCTIONS = "tests.unit.tool_functions"

NUMBERS = st.one_of(st.integers(0, 10**6).map(str), st.floats(0, 1e6, allow_nan=False, allow_infinity=False).map(repr))


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operators = st.sampled_from([" + ", "-", "*", " / ", "//", " % "])
    binary = st.tuples(inner, operators, inner).map(lambda parts: f"({parts[0]}{parts[1]}{parts[2]})")
    power = st.tuples(inner, st.integers(0, 9)).map(lambda parts: f"({parts[0]})**{parts[1]}")
    return st.one_of(binary, power, inner.map(lambda text: f"-{text}"), inner.map(lambda text: f"+({text})"))


@given(st.recursive(NUMBERS, joined, max_leaves=12))
def test_the_calculator_agrees_with_python(expression: str) -> None:
    try:
        expected = repr(eval(compile(ast.parse(expression, mode="eval"), "", "eval"), {"__builtins__": {}}))
    except (ArithmeticError, ValueError):
        expected = "refused"
    try:
        value = calculate(expression)
    except ToolError as error:
        # What is in between may be beyond the bounds where what is at the end is not.
        value = expected if any(word in error.detail for word in ("bits", "finite", "parentheses", "characters")) else "refused"
    assert value == expected


BOMBS = ["9**9**9**9", "-9**-9**9**9", "(" * 990, "9" * 2000, "((9**999)**999)**999", "1.5**99999999", "(-8)**0.5", "1e999", "1/0"]
NOT_ARITHMETIC = ["", "x", "f(1)", "'a'*9", "True", "[1]", "1<2", "1;2", "1\x00", "~1"]


@pytest.mark.parametrize("expression", [*BOMBS, *NOT_ARITHMETIC])
def test_what_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ToolError) as refused:
        calculate(expression)
    assert refused.value.reason == "tool_error"
    assert len(refused.value.detail) < 200


def test_the_calculator_keeps_whole_numbers_whole_and_takes_long_sums() -> None:
    assert calculate(" 2**100 ") == "1267650600228229401496703205376"
    assert calculate("+".join(["1"] * 400)) == "400"
    assert calculate("1**" + "9" * 300) == "1"
    assert calculate("7//2*2.0") == "6.0"


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("hermes", "", []),
        ("hermes", "no call, only [text] and </tool_call>", []),
        ("hermes", f"let me see {CALL} so", [("calculator", "1+2")]),
        ("hermes", CALL + CALL, [("calculator", "1+2")] * 2),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "b": "é"}}</tool_call>', [("f", '{"a": 1, "b": "é"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", "<tool_call>{}</tool_call>", [None]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', [None]),
        ("hermes", '<tool_call>["f"]</tool_call>' + CALL, [None, ("calculator", "1+2")]),
        ("hermes", "<tool_call>" + "[" * 60000 + "</tool_call>", [None]),
        ("hermes", "<tool_call>" + "x" * 70000 + "</tool_call>", [None]),
        ("hermes", '<tool_call>{"name": "f"', [None]),
        ("hermes", CALL * 40, [("calculator", "1+2")] * MAX_CALLS),
        ("hermes", f"a <mm:think> {CALL}", []),
        ("hermes", f"{CALL} begun in the prompt </think> so {CALL}", [("calculator", "1+2")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>' + CALL, [("f", "<think>"), ("calculator", "1+2")]),
        ("brackets", "[THINK][1+1][/THINK][2+2]", [(None, "2+2")]),
        ("brackets", "12+7=[12+7]", [(None, "12+7")]),
        ("brackets", "[calculator: 12+7] [py:print(1)]", [("calculator", "12+7"), ("py", "print(1)")]),
        ("brackets", "[12:30]", [(None, "12:30")]),
        ("brackets", "[]", [None]),
        ("brackets", "[1\n2]", [None]),
        ("brackets", "[a[0]]", [None]),
        ("brackets", "[12+", [None]),
        ("brackets", CALL, []),
    ],
)
def test_calls_are_found(style: Style, text: str, expected: list[tuple[str | None, str] | None]) -> None:
    found = find(text, style)
    assert [(call.name, call.argument) if isinstance(call, Call) else None for call in found] == expected


@given(
    st.lists(st.sampled_from([*"[]:\n{}a1", "<tool_call>", "</tool_call>"]), max_size=60).map("".join),
    st.sampled_from(["hermes", "brackets"]),
)
def test_any_text_is_taken_apart_in_order(text: str, style: Style) -> None:
    found = find(text, style)
    bounds = [bound for call in found for bound in (call.start, call.end)]
    assert bounds == sorted(bounds)
    assert all(text[call.start :].startswith(("[", "<tool_call>")) for call in found)
    assert all(len(call.why) < 300 for call in found if isinstance(call, Malformed))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def ask(name: str, arguments: list[str], **options: float) -> tuple[list[str], Runner]:
    """Each observation, or the reason why there is none; one after the other."""

    async def run() -> tuple[list[str], Runner]:
        (runner,) = loading.load([name], {name.rpartition(":")[2]: options} if options else None).values()
        found = []
        try:
            for argument in arguments:
                try:
                    found.append(await runner.call(argument))
                except ToolError as error:
                    found.append(f"{error.reason}: {error.detail}")
        finally:
            await runner.close()
        return found, runner

    return asyncio.run(run())


def test_a_tool_is_loaded_by_name_and_counts() -> None:
    found, runner = ask("calculator", ["1+2", "x", "2*3"])
    assert found[::2] == ["3", "6"]
    assert found[1].startswith("tool_error")
    assert (runner.counts.calls, dict(runner.counts.failures)) == (3, {"tool_error": 1})
    assert schema(runner)["function"]["parameters"]["properties"].keys() == {"expression"}


@pytest.mark.parametrize("name", ["shout", "shout_later"])
def test_a_users_function(name: str) -> None:
    found, runner = ask(f"{FUNCTIONS}:{name}", ["ab", "raise", "refuse", "number", "flood", "é\n"], characters=100)
    assert found[0] == "AB"
    assert found[1] == "tool_error: error: ValueError: no such thing"
    assert found[2].startswith("tool_error: do not ask")
    assert found[3].startswith("tool_crash")
    assert found[4].startswith("tool_flood: " + "X" * 100)
    assert len(found[4]) < 200
    assert found[5] == "É\n"
    assert runner.name == name
    assert runner.description == "Makes text louder."
    assert runner.counts.calls == 6


def test_a_function_that_hangs_or_dies_costs_its_own_call_only() -> None:
    found, runner = ask(f"{FUNCTIONS}:shout", ["ab", "hang", "exit", "ab"], timeout_s=2.0)
    assert found[0] == found[3] == "AB"
    assert found[1].startswith("tool_timeout")
    assert found[2].startswith("tool_crash")
    assert dict(runner.counts.failures) == {"tool_timeout": 1, "tool_crash": 1}
    assert runner.counts.seconds >= 2.0


def test_a_process_that_hung_is_gone_and_others_are_kept(tmp_path: Path) -> None:
    async def run() -> tuple[str, str, str]:
        (runner,) = loading.load([f"{FUNCTIONS}:process"], {"process": {"timeout_s": 2.0}}).values()
        first, again = await runner.call("a"), await runner.call("b")
        with pytest.raises(ToolError):
            await runner.call("hang")
        other = await runner.call("c")
        await runner.close()
        return first, again, other

    first, again, other = asyncio.run(run())
    assert first == again != other
    for process in (first, other):
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


def test_a_coroutine_that_hangs_is_cancelled() -> None:
    found, _ = ask(f"{FUNCTIONS}:shout_later", ["hang", "ab"], timeout_s=0.2)
    assert found == ["tool_timeout: error: shout_later took longer than 0.2 s", "AB"]


class Slow:
    """Says how many of its calls run."""

    name, description, parameters = "slow", "", {}
    running = most = 0

    async def call(self, argument: str) -> str:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.06)
        self.running -= 1
        if argument == "break":
            raise KeyError("broken")
        return ""

    async def close(self) -> None: ...


def test_concurrency_is_bounded_and_waiting_is_no_time_out() -> None:
    slow = Slow()

    async def run() -> Runner:
        runner = Runner(slow, ToolLimits(timeout_s=1.0, concurrency=2))
        await asyncio.gather(*(runner.call("") for _ in range(40)))
        with pytest.raises(ToolError, match="tool_crash"):
            await runner.call("break")
        return runner

    runner = asyncio.run(run())
    assert slow.most == 2
    assert (runner.counts.calls, dict(runner.counts.failures)) == (41, {"tool_crash": 1})


def test_a_cancelled_call_frees_its_place() -> None:
    async def run() -> Runner:
        runner = Runner(Slow(), ToolLimits(concurrency=1))
        call = asyncio.create_task(runner.call(""))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await runner.call("")
        return runner

    assert asyncio.run(run()).counts.calls == 1


SHOUT = "tests.unit.tool_functions:shout"


def test_options_of_a_function_are_named_by_the_tool() -> None:
    (runner,) = loading.load([SHOUT], {"shout": {"characters": 7}}).values()
    assert (runner.name, runner._limits.characters) == ("shout", 7)


@pytest.mark.parametrize(
    ("names", "options", "match"),
    [
        (["abacus"], {}, "abacus"),
        (["tests.unit.tool_functions:nothing"], {}, "nothing"),
        (["tests.unit.tool_functions:NUMBER"], {}, "an integer, expected a function"),
        (["calculator", "calculator"], {}, "two tools named calculator"),
        (["calculator"], {"python": {}}, "python: got no such tool, expected calculator"),
        (["calculator"], {"calculater": {}}, "did you mean calculator"),
        ([SHOUT], {"shuot": {}}, "expected shout; did you mean shout"),
        ([SHOUT], {"shout": {"timeout": 3}}, r"options\.shout\.timeout: got an unknown key.*did you mean timeout_s"),
        (["calculator"], {"calculator": {"wall_s": 3}}, "wall_s"),
        (["calculator"], {"calculator": {"timeout_s": -1}}, r"timeout_s: got -1, expected a number above 0"),
        (["calculator"], {"calculator": {"concurrency": 1.5}}, r"concurrency: got 1\.5"),
        (["python"], {"python": {"seconds": 3}}, r"seconds: got an unknown key"),
    ],
)
def test_what_cannot_be_loaded(names: list[str], options: dict[str, dict[str, float]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        loading.load(names, options)
