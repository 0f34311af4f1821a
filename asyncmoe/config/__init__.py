"""The configuration of a run: YAML in, frozen validated values out.

Unknown keys, wrong types and impossible values are refused with the key's path, the value given and the value expected.
`asyncmoe.models.check` refuses combinations that depend on the model's shape.
"""

from __future__ import annotations

from asyncmoe.config.loading import parse
from asyncmoe.config.moved import load, of_run
from asyncmoe.config.schema import Config

__all__ = ["Config", "load", "of_run", "parse"]
