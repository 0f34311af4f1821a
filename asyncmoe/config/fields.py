"""Building blocks of the configuration: bounded numbers, and sections that refuse unknown keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _not_bool(value: Any) -> Any:
    # pydantic accepts true as 1. Strict numbers would also refuse 1e-6, which YAML 1.1 reads as text.
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _switch(value: Any) -> Any:
    # YAML 1.1 reads an unquoted on or off as a boolean.
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Whole = Annotated[int, BeforeValidator(_not_bool)]
Real = Annotated[float, BeforeValidator(_not_bool), Field(allow_inf_nan=False)]
Positive = Annotated[Whole, Field(gt=0)]
NonNegative = Annotated[Whole, Field(ge=0)]
PositiveFloat = Annotated[Real, Field(gt=0)]
NonNegativeFloat = Annotated[Real, Field(ge=0)]
Decay = Annotated[Real, Field(ge=0, lt=1)]
Share = Annotated[Real, Field(gt=0, le=1)]
Port = Annotated[NonNegative, Field(le=65535)]
Switch = BeforeValidator(_switch)


class Section(BaseModel):
    """A frozen section of the configuration that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)
