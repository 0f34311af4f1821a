"""The runner of tests/integrations: which files it takes, what it refuses, and when it makes an environment anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations import run as runner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("alpha", "beta"):
        (tmp_path / f"test_{name}.py").touch()
    (tmp_path / "alpha.txt").write_text("")
    (tmp_path / "beta.txt").write_text("# why it needs these\n# packages of: none\nsix==1.17.0\n")
    return tmp_path


def test_every_file_or_those_named_are_taken(folder: Path) -> None:
    assert [(case.name, case.packages_of) for case in runner.cases(folder, [])] == [("alpha", "trainer"), ("beta", "none")]
    assert [case.name for case in runner.cases(folder, ["beta"])] == ["beta"]


@pytest.mark.parametrize(
    ("file", "text", "names", "told"),
    [
        ("alpha.txt", "", ["gamma"], "gamma: got no {}/test_gamma.py, expected some of alpha, beta"),
        ("test_gamma.py", "", [], "{}/gamma.txt: got none, expected the requirements of test_gamma.py"),
        ("beta.txt", "# packages of: both", [], "{}/beta.txt: got packages of both, expected one of trainer, engine, none"),
        ("beta.txt", "# packages of: none\n# packages of: engine", [], "beta.txt: got packages of none and of engine, expected one of"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(folder: Path, file: str, text: str, names: list[str], told: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(SystemExit) as refused:
        runner.cases(folder, names)
    assert told.format(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_environment_is_made_anew_when_anything_it_comes_from_changes() -> None:
    case = runner.Case("alpha", "trainer", "six\n")
    others = [runner.Case("alpha", "none", "six\n"), runner.Case("alpha", "trainer", "six==1.17.0\n")]
    assert case.digest("3.11") == runner.Case("alpha", "trainer", "six\n").digest("3.11")
    assert len({case.digest("3.11"), case.digest("3.12"), *(other.digest("3.11") for other in others)}) == 4


def test_files_of_requirements_that_are_named_belong_to_them(folder: Path) -> None:
    (folder / "alpha.txt").write_text("-r shared.txt\n")
    (folder / "shared.txt").write_text("six==1.16.0\n")
    before = runner.cases(folder, ["alpha"])[0]
    (folder / "shared.txt").write_text("six==1.17.0\n")
    after = runner.cases(folder, ["alpha"])[0]
    assert before.digest("3.11") != after.digest("3.11")


def test_every_file_in_the_tree_has_exact_requirements() -> None:
    for case in runner.cases(ROOT / runner.FOLDER, []):
        loose = [line for line in case.requirements.splitlines() if line.strip() and not re.match(r"#|-|[\w.\[\],-]+==\S+$", line)]
        assert not loose, f"{case.name}.txt: {loose}: another day would test another package"
