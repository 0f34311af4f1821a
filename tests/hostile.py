"""What somebody else may have put into a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Hostile:
    """A pickle of it makes a file `mark` when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)
