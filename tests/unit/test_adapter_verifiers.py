"""Why an environment of verifiers cannot be loaded, without the package; tests/integrations have it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncmoe.rollout.adapters.verifiers import no_taskset


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "old",
            "def load_environment(): ...",
            "my_old with load_environment, expected a taskset.*; load_environment is of verifiers 0",
        ),
        ("lacking", "import no_such_package", "my_lacking, which imports no_such_package: not installed, expected .*; install it for "),
        ("both", "__all__ = ()\ndef load_environment(): ...", ""),
        ("neither", "x = 1", ""),
        ("broken", "1 / 0", ""),
    ],
)
def test_why_there_is_no_taskset(name: str, code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"my_{name}.py").write_text(code)
    found = no_taskset(f"owner/my-{name}@0.1")
    assert found is None if not said else re.search(f"^the option environment: got {said}", str(found))


def test_a_missing_module_is_left_to_the_package() -> None:
    assert no_taskset("no-such-environment") is None
