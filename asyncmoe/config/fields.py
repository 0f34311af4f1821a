"""Building blocks of the configuration: bounded numbers, names of a user's own code, and sections that refuse unknown keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from asyncmoe import plugins


def _number(value: Any) -> Any:
    # pydantic accepts true as 1. Strict numbers would also refuse 1e-6, which YAML 1.1 reads as text.
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    if isinstance(value, int) and abs(value) >= 2**63:  # SQLite, msgpack and torch hold 64 bits
        raise PydanticCustomError("number_size", "Input should be a number of at most 64 bits")
    return value


def _switch(value: Any) -> Any:
    # YAML 1.1 reads an unquoted on or off as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


NUMBER = BeforeValidator(_number)
"""In `Annotated`, `NUMBER` follows the bounds; otherwise the JSON schema lacks them."""
FINITE = Field(allow_inf_nan=False)
Real = Annotated[float, FINITE, NUMBER]
Positive = Annotated[int, Field(gt=0), NUMBER]
NonNegative = Annotated[int, Field(ge=0), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), FINITE, NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0), FINITE, NUMBER]
_WEEK_S = 604800
"""Longest wait: three times this, in milliseconds, still fits the timeout of poll(2)."""
Seconds = Annotated[float, Field(gt=0, le=_WEEK_S), FINITE, NUMBER]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=_WEEK_S), FINITE, NUMBER]
Decay = Annotated[float, Field(ge=0, lt=1), FINITE, NUMBER]
Share = Annotated[float, Field(gt=0, le=1), FINITE, NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), FINITE, NUMBER]
Port = Annotated[int, Field(ge=0, le=65535), NUMBER]
Switch = BeforeValidator(_switch)


@dataclass(frozen=True)
class NameOrPlugin:
    """Marks a text that is one of `names`, or names a user's own code as `package.module:name`."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the text with its check."""
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, source: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema: one of the names, or the form of a user's own code."""
        own = {"type": "string", "pattern": f"^{plugins.NAME.pattern}$"}
        return {"anyOf": [{"enum": list(self.names), "type": "string"}, own]} if self.names else own

    def _check(self, value: str) -> str:
        if value not in self.names and not plugins.is_name(value):
            known = "".join(f"{name!r}, " for name in self.names).removesuffix(", ")
            context = {"meant": meant} if (meant := self._meant(value)) else None
            message = f"Input should be {known}{' or ' if known else ''}{plugins.FORM}"
            raise PydanticCustomError("name_or_plugin", message, context)
        return value

    def _meant(self, value: str) -> str | None:
        if near := plugins.nearest(value, self.names):
            return near
        if plugins.is_name(f"{value}name"):
            return f"{value}NAME"
        with_colon = ":".join(value.rsplit(".", 1))
        return with_colon if plugins.is_name(with_colon) else None


def refused(key: str, got: object, expected: str, hint: str = "") -> ValueError:
    """Return the error of a validator, which `asyncmoe.config.refusals` reads. `hint`: the fix, if `expected` does not say it."""
    return ValueError(f"{key}: got {got}, expected {expected}{'; ' if hint else ''}{hint}")


def wrong_address(url: str) -> tuple[str, str] | None:
    """Return the fault of a server's address, and the expected form; None if it is valid."""
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc:
        return None
    got = "an address with a user's name or password" if "@" in parts.netloc else repr(url)
    return got, "http://... or https://... without a user's name or password; token_env is for a token"


def said(value: object) -> str:
    """Format a value as YAML."""
    return {True: "true", False: "false", None: "null"}.get(value, "") if isinstance(value, bool | None) else str(value)


def check_options(key: str, options: Mapping[str, Any] | None, named: str, target: str) -> None:
    """Refuse options for anything but a user's own code.

    Args:
        key, options: the key of the options, and its value.
        named, target: the key that names the code, and its value.

    Raises:
        ValueError: there are options, but `target` is built in.
    """
    if options is not None and not plugins.is_name(target):
        raise refused(key, options, f"null because {named} is {target}; leave them out, or name your own code as {plugins.FORM}")


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys. `~` and `~user` in paths are expanded. The docstring of a key is its
    description in docs/config.md and in the JSON schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _at_home(cls, value: Any, made: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(path := made(value), Path):
            return path
        if not str(value) or "\0" in str(value):
            raise PydanticCustomError("path", "Input should be the name of a file or directory")
        try:
            return path.expanduser()
        except RuntimeError:
            raise PydanticCustomError("home", "Input should be a path below an existing home directory") from None


Filled = TypeVar("Filled", bound=Section)


def filled(one: Filled, others: Section, names: Iterable[str]) -> Filled:
    """Return `one` with the null values of the keys in `names` replaced by another section's."""
    return one.model_copy(update={name: getattr(others, name) for name in names if getattr(one, name) is None})
