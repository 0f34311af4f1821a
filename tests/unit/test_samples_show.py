"""`asyncmoe show`: its choice, its output, and that no model output reaches a terminal raw."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models

from asyncmoe.errors import DataError, UserError
from asyncmoe.rollout.episodes.environment import Episode
from asyncmoe.rollout.pieces import Pieces
from asyncmoe.rollout.scoring import Sample, Score
from asyncmoe.rollout.scoring.exact import Exact
from asyncmoe.telemetry.samples import terminal
from asyncmoe.telemetry.samples.command import SampleQuery, select
from asyncmoe.telemetry.samples.index import index
from asyncmoe.telemetry.samples.visible import visible
from tests.unit.command_line import run_command
from tests.unit.sampled_run import SampledRun

NASTY = "\x1b]0;owned\x07 \x1b[31mred\x1b[0m \x9b2J \r\b \u202egnp\u202c \x00\x7f [bold]x[/] :smile: \u200b"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three steps of one group each; rewards 0.5, 0 and 1."""
    run = SampledRun(tmp_path / "run")
    for n, texts in enumerate((["19", "x"], ["1", "2"], ["19", "19"])):
        run.train(run.group(n, texts), 4 + n)
    return tmp_path / "run"


def shown(run_dir: Path, width: int = 100, tokens: int = 400, **console: Any) -> str:
    out = StringIO()
    for entry in index(run_dir):
        terminal.show(entry.load(), Console(file=out, width=width, markup=False, emoji=False, **console), tokens)
    return out.getvalue()


def printed(*arguments: str) -> list[str]:
    """The command's output to a pipe."""
    result = run_command(["show", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout.splitlines()


class Two(Exact):
    """A scorer with two metrics."""

    async def score(self, sample: Sample) -> Score:
        return Score(0.75, metrics={"right": 1.0, "brief": 0.5})


def test_metrics_are_beside_the_reward(tmp_path: Path) -> None:
    SampledRun(tmp_path, scorer=Two()).group(0, ["19", "7"])
    assert "right 1 · brief 0.5" in shown(tmp_path)
    assert '"metrics": {"right": 1.0, "brief": 0.5}' in printed(str(tmp_path), "--json")[0]


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("wanted", "groups"),
    [
        (SampleQuery(), [2]),
        (SampleQuery(order="worst"), [1, 0, 2]),
        (SampleQuery(order="best", limit=1), [2]),
        (SampleQuery(step=6), [1]),
        (SampleQuery(version=4, limit=2), [2, 1]),
        (SampleQuery(group=0, outcome="trained"), [0]),
    ],
)
def test_conditions_and_orders(run_dir: Path, wanted: SampleQuery, groups: list[int]) -> None:
    assert [entry.group for entry in select(index(run_dir), wanted)] == groups


def test_what_there_is_not_is_refused(run_dir: Path) -> None:
    with pytest.raises(DataError) as refused:
        select(index(run_dir), SampleQuery(step=9, outcome="rejected"))
    assert "3 groups: 3 trained" in str(refused.value)


# ---------------------------------------------------------------- printing


def test_colours_differ_where_versions_do(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    run.train(run.group(0, ["ab" * 60, "19"]), 4, drift=-0.6)
    text = shown(tmp_path / "run", force_terminal=True, color_system="truecolor")
    styles = {match[1] for match in re.finditer(r"\x1b\[([\d;]+)m[ab]+\x1b", text)}
    assert len(styles) >= 2, styles
    assert "".join(re.findall(r"(?<=m)[ab]+(?=\x1b)", text)).startswith("abab")


def test_the_middle_of_a_long_response_is_left_out(run_dir: Path, tmp_path: Path) -> None:
    text = shown(run_dir, width=160)
    assert "\x1b" not in text
    for words in ("group 0 · trained in step 5 · mean reward 0.5", "12+7=", "19<eos>"):
        assert words in text
    run = SampledRun(tmp_path / "long")
    run.group(0, ["x" * 3000, "19"])
    assert "… 2601 tokens …" in shown(tmp_path / "long", width=120).replace("\n", "")
    assert shown(tmp_path / "long", tokens=0).count("x") == 3000


def test_a_second_agent_is_shown_with_what_it_was_asked(tmp_path: Path) -> None:
    class Checked:
        async def run(self, episode: Episode) -> float:
            for name, asked in (("policy", episode.prompt.text), ("checker", "is it right?")):
                agent = episode.agent(name)
                agent.see(asked)
                await agent.respond()
            return 1.0

    SampledRun(tmp_path / "run", Checked()).group(0, ["19", "yes", "x", "no"])
    text = shown(tmp_path / "run", width=160)
    assert [text.count(words) for words in ("12+7=", "is it right?", "response 0 checker")] == [1, 2, 1]


def test_nothing_of_the_models_is_a_control_character(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    run.group(0, [NASTY, "line\nline"], run.prompt(NASTY, NASTY))
    for text in (shown(tmp_path / "run"), "\n".join(printed(str(tmp_path / "run")))):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u200b]", text)
    assert "␛]0;owned␇" in shown(tmp_path / "run")
    assert "[bold]x[/] :smile:" in shown(tmp_path / "run")
    (line,) = printed(str(tmp_path / "run"), "--json")
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u200b]", line)
    assert "".join(json.loads(line)["members"][0]["tokens"]["piece"]).endswith(f"{NASTY}<eos>")
    assert json.loads(line)["question"] == NASTY


def test_signs_are_exact() -> None:
    assert visible("a\tb\nc\x1b\x7f\x9b") == "a␉b\nc␛␡⟨009B⟩"


def test_json_is_as_long_as_asked(tmp_path: Path) -> None:
    run = SampledRun(tmp_path / "run")
    run.group(0, ["x" * 3000, "19"], run.prompt("1+" * 1000, "19"))
    group = json.loads(printed(str(tmp_path / "run"), "--json", "--tokens", "6")[0])
    first, second = group["members"]
    assert "".join(first["tokens"]["piece"]) == "1+1+1+xxxxx<eos>"
    assert [(gap["role"], gap["count"]) for gap in first["gaps"]] == [("prompt", 1994), ("response", 2995)]
    assert [gap["role"] for gap in second["gaps"]] == ["prompt"]
    for more in ((), ("--tokens", "0")):
        whole = json.loads(printed(str(tmp_path / "run"), "--json", *more)[0])["members"][0]
        assert (whole["tokens"]["piece"].count("x"), whole["gaps"]) == (3000, [])


@pytest.mark.parametrize("wrong", [("--outcome", "eaten"), ("--worst", "--best")])
def test_a_wrong_option_is_refused(run_dir: Path, wrong: tuple[str, str]) -> None:
    result = run_command(["show", str(run_dir), *wrong])
    assert result.exit_code
    assert wrong[0] in (str(result.exception) if isinstance(result.exception, UserError) else result.output)


# ---------------------------------------------------------------- pieces


class Backend:
    def __init__(self, rust: Rust) -> None:
        self.rust, self.decoded = rust, 0

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.rust.encode(text).ids)

    def decode_all(self, tokens: Sequence[int]) -> str:
        self.decoded += 1
        return str(self.rust.decode(list(tokens), skip_special_tokens=False))


def sentencepiece() -> Rust:
    """Llama's kind: a blank is part of the next token and is stripped from the beginning of a text; other bytes are tokens."""
    words = ["a", "b", "▁", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    rust = Rust(models.BPE({word: i for i, word in enumerate(words)}, [("▁", "a"), ("▁", "b")], byte_fallback=True))
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return rust


def test_pieces_of_a_tokenizer_that_strips_blanks_make_its_text() -> None:
    backend = Backend(sentencepiece())
    text = "▁a▁b▁aé漢🙂▁b"
    ids = backend.encode(text)
    pieces = asyncio.run(Pieces(backend).of(ids))
    assert "".join(pieces) == " a b aé漢🙂 b"
    assert len(pieces) == len(ids)
    assert pieces.count("🙂") == 1
