"""Mistakes in the arguments of the `asyncmoe` command, in the form of all other errors: one line with got, expected and a hint."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperOption

from asyncmoe.errors import Interrupted, UserError

_click: Any = sys.modules[typer.BadParameter.__module__]
"""The module of click's errors: click's own, or the copy in newer releases of typer."""
_COMMAND = re.compile(r"No such command '(.*?)'")


def invoke(app: typer.Typer) -> None:
    """Run the command that the process's arguments name.

    Raises:
        UserError: invalid arguments, or standard output cannot be written.
        AsyncmoeError: see the command.
        Interrupted: Ctrl-C, with the command's own text if it has one.
        SystemExit: the command chose another status than 0.
    """
    run: Callable[..., object] = app
    _name_no_type_of_flags()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # its encoding may lack characters of file names
    try:
        status = run(prog_name="asyncmoe", standalone_mode=False)  # in standalone mode typer frames an error over several lines
    except _click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.ctx.get_help())
            sys.exit(error.exit_code)
        raise user_error(error) from None
    finally:
        _flush()
    if status == Interrupted.exit_code:  # typer returns it for Ctrl-C
        raise Interrupted("interrupted")
    if isinstance(status, int) and status:
        sys.exit(status)


def _name_no_type_of_flags() -> None:
    """Leave the type out of flags in --help: they take no value. Older releases of typer have no such method, and leave it out."""
    option: Any = TyperOption
    if (shown := getattr(option, "display_type_rich", None)) is not None:
        option.display_type_rich = lambda self, ctx: None if self.is_flag else shown(self, ctx)


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # at exit the interpreter flushes what could not be written
        if not isinstance(error, BrokenPipeError):  # its reader has what it wants, as `head` does
            raise UserError("standard output", got=error.strerror, expected="a writable file, pipe or terminal") from None


def user_error(error: Any) -> UserError:
    """Translate a `click.UsageError`."""
    at = error.ctx.command_path if error.ctx else "asyncmoe"
    see = f"see {at} --help"
    if isinstance(error, _click.NoSuchOption):
        return _unknown_option(error, at)
    if isinstance(error, _click.MissingParameter) and error.param is not None:
        what = getattr(error.param, "help", None) or "it"
        return UserError(at, got=f"no {_named(error.param)}", expected=what.rstrip("."), hint=see)
    if isinstance(error, _click.BadParameter) and error.param is not None:
        got, wanted = _refused_value(error)
        return UserError(f"{at}: {_named(error.param)}", got=got, expected=wanted, hint=see)
    if (unknown := _COMMAND.match(error.message)) is not None:
        commands = list(error.ctx.command.commands)
        near = get_close_matches(unknown[1], commands, 1)
        meant = f"did you mean {at} {near[0]}?" if near else None
        return UserError(at, got=f"an unknown command {unknown[1]}", expected=f"one of {', '.join(commands)}", hint=meant)
    message = error.format_message().removeprefix("Got ").rstrip(".")
    return UserError(at, got=message[0].lower() + message[1:], expected="other arguments", hint=see)


def _refused_value(error: Any) -> tuple[str, str]:
    """Return the value of a `click.BadParameter`, and what was expected."""
    found: list[Any] = getattr(error.__cause__, "errors", list)()  # newer releases of typer check values with pydantic
    if not found:
        return error.message.rstrip("."), "another value"
    from asyncmoe.config import refusals  # imports pydantic, which takes a second

    return repr(found[0]["input"]), refusals.wanted(found[0]).rpartition(" is not ")[2].rstrip(".")


def _unknown_option(error: Any, at: str) -> UserError:
    from asyncmoe.config import refusals  # imports pydantic, which takes a second

    parameters = error.ctx.command.params
    options = [*(one.opts[0] for one in parameters if one.opts[0].startswith("-")), "--help"]
    takes_keys = any("KEY=VALUE" in (one.metavar or "") for one in parameters)
    meant = list(error.possibilities or ())
    if not meant and takes_keys:
        meant = [f"{key}=VALUE" for key in refusals.keys_named(error.option_name.lstrip("-").replace("-", "_"))]
    expected = f"{'KEY=VALUE or ' if takes_keys else ''}{'one of ' if options[1:] else ''}{', '.join(options)}"
    hint = f"did you mean {' or '.join(meant[:3])}?" if meant else None
    return UserError(at, got=f"an unknown option {error.option_name}", expected=expected, hint=hint)


def _named(parameter: Any) -> str:
    """Return the user's name of a parameter: the option, or the metavar of an argument."""
    return str(parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name)
