"""The command line in this process, built once: typer rebuilds it for every call, which takes longer than most commands."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest import mock

from typer import testing
from typer.main import get_command

from asyncmoe import cli


@cache
def whole() -> Any:
    """The command and its subcommands."""
    return get_command(cli.app)


def run_command(arguments: Sequence[str], **options: Any) -> testing.Result:
    """As `typer.testing.CliRunner.invoke`."""
    with mock.patch.object(testing, "_get_command", return_value=whole()):
        return testing.CliRunner().invoke(cli.app, arguments, **options)
