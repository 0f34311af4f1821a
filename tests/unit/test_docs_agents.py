"""The YAML of docs/guides/agents.md is configuration.

The functions themselves run with the real packages: tests/integrations/test_frameworks.py and test_coding.py.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import yaml

from asyncmoe.config import parse
from asyncmoe.errors import UserError
from asyncmoe.rollout.tasks import own
from tests.unit import doc_pages

PAGE = doc_pages.read("guides/agents.md")


def test_an_environment_of_verifiers_is_configured() -> None:
    (block,) = doc_pages.blocks(PAGE, "yaml")
    config = parse({"run": {"dir": "r", "steps": 1}, "model": {"path": "m"}, **yaml.safe_load(block.text)})
    assert config.task.kind.startswith("asyncmoe.rollout.adapters.verifiers:")
    assert config.environment.agent == "asyncmoe.rollout.adapters.verifiers:rollout"


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed; tests/integrations tries it")
def test_a_task_without_the_package_is_refused_in_one_line() -> None:
    (block,) = doc_pages.blocks(PAGE, "yaml")
    options = yaml.safe_load(block.text)["task"]["options"]
    with pytest.raises(UserError, match=r"the package verifiers: got none, expected it .* run: \S+ -m pip install \"verifiers>=") as caught:
        own.load("asyncmoe.rollout.adapters.verifiers:Examples", options, "task")
    assert "\n" not in str(caught.value)
