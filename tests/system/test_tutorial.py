"""docs/tutorial.md from first line to last: every file is written and every command is run, in order and exactly as on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncmoe import checkpoints
from tests.system.runs import REPOSITORY, logs, metrics
from tests.unit.doc_pages import Block, blocks, read

pytestmark = [pytest.mark.system, pytest.mark.thorough]
PAGE = blocks(read("tutorial.md"))
FILES = {block.text.partition("\n")[0].removeprefix("# "): block for block in PAGE if block.word in ("python", "yaml")}
COMMANDS = {line: block for block in PAGE if block.word == "sh" for line in block.text.splitlines()}


class Reader:
    """A reader that follows the page in a directory.

    Attributes:
        said: standard output of each command.
    """

    def __init__(self, here: Path) -> None:
        self.here = here
        self.said: dict[str, str] = {}

    def follow(self, block: Block) -> None:
        if block.word in ("python", "yaml"):
            (self.here / block.text.partition("\n")[0].removeprefix("# ")).write_text(block.text)
        elif block.word == "sh":
            for line in block.text.splitlines():
                self.call(line)

    def call(self, line: str) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}\n{logs(self.here / 'runs/tutorial')}"
        self.said[line] = done.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    found = Reader(tmp_path_factory.mktemp("tutorial"))
    for block in PAGE:
        found.follow(block)
    return found


def test_nothing_of_the_page_is_left_out(reader: Reader) -> None:
    assert {block.word for block in PAGE} == {"", "python", "yaml", "sh", "text"}
    assert set(reader.said) == set(COMMANDS)
    assert len(COMMANDS) >= 9
    assert set(FILES) <= {path.name for path in reader.here.iterdir()}


def test_what_the_page_says_is_printed(reader: Reader) -> None:
    (printed,) = [block.text for block in PAGE if block.word == "text"]
    assert reader.said["asyncmoe config validate tutorial.yaml"] == printed
    assert '"question"' in reader.said["head -n 2 train.jsonl"]


def test_the_worst_responses_are_shown_with_the_reasons_of_the_reward(reader: Reader) -> None:
    shown = reader.said["asyncmoe show runs/tutorial --worst --limit 1"]
    assert re.search(r"\d off|no number", shown)
    group = json.loads((reader.here / "group.json").read_text())
    assert len(group["members"]) == 8
    assert (reader.here / "runs/tutorial/report.html").stat().st_size > 10_000


def test_the_second_run_goes_on_where_the_first_ended(reader: Reader) -> None:
    steps = metrics(reader.here / "runs/tutorial")
    assert [step["step"] for step in steps] == list(range(1, 81))
    assert [step["phase"] for step in steps] == ["warmup"] * 60 + ["rl"] * 20
    assert checkpoints.newest(reader.here / "runs/tutorial") == checkpoints.directory(reader.here / "runs/tutorial", 80)


def test_test_questions_were_asked_and_never_trained(reader: Reader) -> None:
    lines = reader.said["python evaluations.py"].splitlines()
    assert lines
    assert all(re.fullmatch(r"version \d+: reward [01]\.\d\d over 20 questions", line) for line in lines)
    assert lines[0].startswith("version 60:"), "the first version measured is that of the warm-up's end"


def test_transformers_loads_what_was_trained(reader: Reader) -> None:
    found = re.fullmatch(r"reward (\d\.\d\d) over 20 questions\n", reader.said["python try_model.py"])
    untrained = FILES["try_model.py"].text.replace("runs/tutorial-hf", "runs/models/tiny")
    (reader.here / "untrained.py").write_text(untrained)
    reader.call("python untrained.py")
    assert float(found[1]) > float(reader.said["python untrained.py"].split()[1])
