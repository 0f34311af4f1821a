"""The number of examples drawn for a property."""

from __future__ import annotations

from hypothesis import settings


def examples(number: int) -> int:
    """`number`; half of it without --thorough, as of properties that name none (tests/conftest.py)."""
    return number * settings.default.max_examples // 100
