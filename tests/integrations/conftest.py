"""Fixtures of tests against real packages, which do not read tests/conftest.py."""

from __future__ import annotations

import pytest

from asyncmoe.rollout.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the policy that answers agents."""
    from tests.unit import openai_policy

    return openai_policy.tokenizer(tmp_path_factory.mktemp("tokenizer"))
