"""Fixtures of tests against real packages, which do not read tests/conftest.py."""

from tests.conftest import known

__all__ = ["known"]
