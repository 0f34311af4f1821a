"""Tasks: the same question for the same number, right answers, and data errors that name file and line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncmoe.config.model import MadeModel
from asyncmoe.errors import DataError
from asyncmoe.models.make import make_model
from asyncmoe.rollout.tasks import Example
from asyncmoe.rollout.tasks.encode import Encoder
from asyncmoe.rollout.tasks.jsonl import read
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.prompts import arithmetic, jsonl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, MadeModel(layers=1, hidden=32, experts=2), seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def evaluate(text: str) -> int:
    left, sign, right = re.fullmatch(r"(\d+)([+*-])(\d+)=", text).groups()  # type: ignore[union-attr]
    return {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]


def test_arithmetic_is_right_and_within_its_difficulty(tokenizer: Tokenizer) -> None:
    task = arithmetic(tokenizer, ("+", "-", "*"), 2, seed=5)
    prompts = [task.prompt(group) for group in range(300)]
    assert all(prompt.answer == str(evaluate(prompt.text)) for prompt in prompts)
    operands = {int(number) for prompt in prompts for number in re.findall(r"\d+", prompt.text)}
    assert 0 <= min(operands) < 10
    assert 90 <= max(operands) < 100
    assert {sign for prompt in prompts for sign in "+-*" if sign in prompt.text} == {"+", "-", "*"}
    assert all(tokenizer.decode(prompt.tokens) == prompt.text for prompt in prompts)


def test_arithmetic_depends_on_seed_and_number_only(tokenizer: Tokenizer) -> None:
    first, again, other = (arithmetic(tokenizer, ("+",), 3, seed) for seed in (1, 1, 2))
    expected = [first.prompt(group) for group in range(20)]
    assert [again.prompt(group) for group in reversed(range(20))][::-1] == expected
    assert [other.prompt(group) for group in range(20)] != expected
    assert len({prompt.text for prompt in expected}) > 15


def test_a_demonstration_is_a_question_its_answer_and_the_end(tokenizer: Tokenizer) -> None:
    task = arithmetic(tokenizer, ("-",), 1, seed=0)
    for index in range(50):
        shown = task.demonstration(index)
        assert shown.said[-1] == tokenizer.eos
        assert int(tokenizer.decode(shown.said)) == evaluate(tokenizer.decode(shown.given))


def test_the_wrong_share_of_demonstrations_misses_by_a_digit(tokenizer: Tokenizer) -> None:
    task = arithmetic(tokenizer, ("+", "-"), 2, seed=0, wrong_share=0.3)
    wrong = 0
    for index in range(1000):
        shown = task.demonstration(index)
        right, answer = evaluate(tokenizer.decode(shown.given)), tokenizer.decode(shown.said)
        wrong += int(answer) != right
        assert abs(int(answer)) // 10 == abs(right) // 10
    assert 250 < wrong < 350


def lines(path: Path, *values: object) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
    return path


def test_jsonl_reads_gsm8k(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = lines(
        tmp_path / "train.jsonl",
        {"question": "How many?", "answer": "9 * 2 = 18\n#### 18"},
        {"question": "How much?", "answer": "#### 1,234"},
        {"question": "Which?", "answer": "42", "level": "easy"},
    )
    assert [row.answer for row in read(path)] == ["18", "1,234", "42"]
    task = jsonl(tokenizer, path, chat_template=False, seed=0)
    first = task.prompt(0)
    assert tokenizer.decode(first.tokens) == first.text + "\n"
    demonstration = task.demonstration(0)
    shown = tokenizer.decode(demonstration.given + demonstration.said)
    assert any(shown == f"{row.prompt}\n{row.solution}" for row in read(path))


def test_an_answer_keeps_every_comma(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers = ["Paris, France", "f(1,2)==3", "(3, 4)", "1,234"]
    path = lines(tmp_path / "d.jsonl", *({"question": f"q{i}", "answer": f"so\n#### {answer}"} for i, answer in enumerate(answers)))
    task = jsonl(tokenizer, path, chat_template=False, seed=0)
    assert sorted(task.prompt(group).answer for group in range(4)) == sorted(answers)
    assert [(gold.where, gold.answer) for gold in task.golds()] == [(f"{path} line {n}", answer) for n, answer in enumerate(answers, 1)]


def test_a_line_separator_inside_a_text_is_no_end_of_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a\xe2\x80\xa8b",\r "answer": 1' + b"0" * 400 + b"}\r\n")
    example = read(path)[0]
    assert (example.prompt, example.answer) == ("a\u2028b", str(10**400)), "a file of Windows, and any whole number"


GOOD = b'{"question": "q", "answer": "1"}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"question": "q", "answer": ', "invalid JSON"),
        (b'{"question": "caf\xe9", "answer": "1"}', "invalid JSON"),
        (rb'{"question": "\ud83d x", "answer": "1"}', "invalid JSON"),
        (b'{"question": "q", "answer": "1", "level": [-Infinity]}', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'["q", "1"]', "list"),
        (b'{"question": "q"}', "answer: got nothing"),
        (b'{"question": 3, "answer": "1"}', "question: got 3"),
        (b'{"question": " ", "answer": "1"}', "question: got ' '"),
        (b'{"question": "q", "answer": "9 * 2 ####  "}', "nothing after ####"),
        (b'{"question": "q", "answer": ""}', "answer: got ''"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path} line 3" in str(caught.value)
    assert said in str(caught.value)


def test_a_demonstration_without_a_solution_names_the_ways_out(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"row 7: got neither solution nor answer, .*task\.columns\.answer.*warmup\.steps=0"):
        Encoder(tokenizer, chat=False).demonstration(Example("q", where="row 7"))


@pytest.mark.parametrize("write", [lambda path: None, lambda path: path.write_text("\n"), lambda path: path.write_bytes(b"\xff\xfe\n")])
def test_a_file_without_lines_is_refused(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "d.jsonl"
    write(path)
    with pytest.raises(DataError, match=str(path)):
        read(path)


def test_a_tokenizer_larger_than_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    for file in model.glob("*.json*"):
        (tmp_path / file.name).write_text(file.read_text())
    settings = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 10}))
    with pytest.raises(DataError, match="vocab_size 10"):
        Tokenizer(tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for kind in ("qwen3", "llama"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 320}))
        for content, told in ((None, "no vocabulary"), ("{", "tokenizer.json, incomplete"), (POINTER, "tokenizer.json: Git LFS pointers")):
            (tmp_path / "tokenizer.json").unlink(missing_ok=True)
            if content is not None:
                (tmp_path / "tokenizer.json").write_text(content)
            with pytest.raises(DataError, match=told):
                Tokenizer(tmp_path)


REMOTE = """
from transformers import PreTrainedTokenizer

class Digits(PreTrainedTokenizer):
    vocab_size = 12
    def __init__(self, **kwargs):
        super().__init__(eos_token="$", **kwargs)
    def get_vocab(self):
        return {sign: i for i, sign in enumerate("0123456789+$")}
    def _tokenize(self, text):
        return list(text)
    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]
    def _convert_id_to_token(self, index):
        return "0123456789+$"[index]
    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose tokenizer is Python of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "remote"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "vocab_size": 12}))
    (folder / "tokenization_digits.py").write_text(REMOTE)
    said = {"tokenizer_class": "Digits", "auto_map": {"AutoTokenizer": ["tokenization_digits.Digits", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def test_a_tokenizer_of_its_own_python_is_run_when_trusted(remote: Path) -> None:
    with pytest.raises(DataError, match=r"model\.path: .*; model\.trust_remote_code=true runs the Python"):
        Tokenizer(remote)
    found = Tokenizer(remote, trust_remote_code=True)
    assert found.encode("12+7") == (1, 2, 10, 7)
    assert found.decode((1, 9, 11)) == "19"
    assert found.eos == 11


def test_a_plain_tokenizer_is_the_one_that_transformers_would_find_and_needs_no_torch(model: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    code = f"import sys; from asyncmoe.rollout.tokenizer import *; Tokenizer(Path({str(model)!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    found = AutoTokenizer.from_pretrained(model)
    text = "<|im_start|>user\n12 + 7 = é<|im_end|>"
    assert list(tokenizer.encode(text)) == found.encode(text, add_special_tokens=False)
    assert (tokenizer.eos, tokenizer.positions) == (found.eos_token_id, 2048)
