"""Optional kernels are found by what they hold, not by a name that somebody else's package has too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncmoe.errors import UserError
from asyncmoe.platform import kernels


def test_an_unrelated_apex_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    with pytest.raises(UserError, match="pip uninstall apex"):
        kernels.detect()
    del sys.modules["apex"]  # looking for a submodule imported it
