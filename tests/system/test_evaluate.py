"""`asyncmoe eval`: a checkpoint's scores from a real engine, without a run."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncmoe.telemetry.rollout_schema import Evaluation
from tests import families
from tests.configs import without_template
from tests.system.runs import Command, provide, refused, wait_for

pytestmark = pytest.mark.system
MOST = 6
QUESTIONS = [f"{n} and {n * n}" for n in range(8)]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The demo, with questions of a file and a scorer that measures the text."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, questions in {"train": ["What else?"], "asked": QUESTIONS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"question": one, "answer": "1"}) + "\n" for one in questions))
    of_set = f"path: {folder / 'asked.jsonl'}"
    task = f"task={{kind: jsonl, path: {folder / 'train.jsonl'}, chat_template: false}}"
    sets = f"evaluation.sets={{greedy: {{{of_set}, temperature: 0}}, sampled: {{{of_set}, samples: 4}}}}"
    settings = [task, sets, "scoring.scorer=tests.unit.scorers:length", "warmup.wrong_share=0", f"rollout.max_new_tokens={MOST}"]
    return ["eval", str(provide(folder / "model")), "examples/demo.yaml", *settings]


def test_a_checkpoint_gets_the_scores_of_what_transformers_says(arguments: list[str], tmp_path: Path) -> None:
    out, _ = Command(*arguments, "--json", str(tmp_path / "scores.jsonl")).succeed(120)
    greedy, sampled = (msgspec.json.decode(line, type=Evaluation) for line in (tmp_path / "scores.jsonl").read_bytes().splitlines())
    lengths, rewards = zip(*map(said(Path(arguments[1])), QUESTIONS), strict=True)
    assert (greedy.name, greedy.version, greedy.questions, greedy.failed) == ("greedy", 0, len(QUESTIONS), {})
    assert greedy.reward_mean == pytest.approx(fmean(rewards))
    assert greedy.reward_stderr == pytest.approx(stdev(rewards) / len(rewards) ** 0.5)
    assert greedy.response_tokens_mean == fmean(map(len, lengths))
    assert greedy.truncated_fraction == fmean(len(one) == MOST for one in lengths)
    assert (sampled.name, sampled.episodes, [*sampled.pass_at]) == ("sampled", 4 * len(QUESTIONS), ["1", "2", "4"])
    assert all(word in out for word in ("greedy", "sampled", "pass@4", f"{greedy.reward_mean:.3g}"))


def said(path: Path) -> Any:
    """Return a function that gives transformers' greedy answer to a question: its tokens, and their reward."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = families.with_one_eps(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())

    def answer(question: str) -> tuple[list[int], float]:
        prompt = tokenizer(f"{question}\n", return_tensors="pt", add_special_tokens=False)
        tokens = model.generate(**prompt, max_new_tokens=MOST, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
        return tokens, len(tokenizer.decode(tokens, skip_special_tokens=True)) / 10

    return answer


def test_ctrl_c_ends_the_engines(arguments: list[str]) -> None:
    command = Command(*arguments)
    assert wait_for(lambda: any("platform.sglang" in line for line in command.alive()), 60)
    command.process.send_signal(signal.SIGINT)
    status, _, error = command.finish(60)
    assert (status, error.splitlines()[-1]) == (130, "stopped; its engines have ended"), error
    assert command.gone(), command.alive()


def test_what_cannot_be_evaluated_is_named_before_anything_starts(arguments: list[str], tmp_path: Path) -> None:
    assert refused("eval", arguments[1], "examples/demo.yaml").startswith("evaluation: got no questions in the configuration, expected")
    bare = without_template(Path(arguments[1]), tmp_path / "bare")
    line = refused("eval", str(bare), *arguments[2:], "task.chat_template=true")
    assert line.startswith("task.chat_template: got none in the tokenizer")
