"""Write docs/config.md and docs/simulate.md from the schemas of a run and of a plant. `make docs` runs this script.

The tables depend on `asyncmoe.config.Config` and `asyncmoe.simulate.plant.Plant` alone. tests/unit/test_docs.py checks that both pages are
current.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from asyncmoe.config import Config
from asyncmoe.simulate.plant import Plant

OUT = Path(__file__).parent / "config.md"
OUT_PLANT = Path(__file__).parent / "simulate.md"
HEAD = """\
# Configuration

<!-- Made by docs/generate.py from asyncmoe/config. Do not edit: change the descriptions there, then run `make docs`. -->

One YAML file describes a run, and every process of the run reads the same file. The command line can override any key with its path and a
YAML value: `asyncmoe run examples/demo.yaml run.steps=20 queue.staleness.max_staleness=2`.

Unknown keys, wrong types, values out of bounds and combinations that cannot work are refused before anything starts. For each, a line names
the key, the value given and the value expected. Parallel sizes (`trainer.tp`, `engines.ep` ...) are checked against the model's
`config.json`. The values that a run uses, defaults included, are in `config.yaml` in the run's directory.

`null` means unset. A section marked *optional* is absent unless the file has it. Words such as staleness, version, lease and bucket are
explained in the [glossary](glossary.md).
"""
HEAD_PLANT = """\
# Simulating a run

<!-- Made by docs/generate.py from asyncmoe/simulate/plant.py. Do not edit: change the texts there, then run `make docs`. -->

`asyncmoe simulate` predicts, before any GPU is rented, how many GPUs should generate, which staleness bound to choose, and the speed-up
over synchronous training. It simulates engines, queue, scoring, trainer and weight sync as events, and admits and drops groups by the same
rules as `asyncmoe run`. One YAML file describes the plant, that is the cluster and the run on it:

```
cp examples/plant.yaml my-plant.yaml
asyncmoe simulate my-plant.yaml
asyncmoe simulate my-plant.yaml engines.count=96 trainer.gpus=32 --sweep
```

First measure speeds on a few GPUs with `asyncmoe bench step CONFIG --json FILE`. With `--measured FILE`, `asyncmoe simulate` derives
`engines.step_s` and `trainer.step_s` from these speeds, scaled by the number of GPUs; it also takes the response lengths from the file,
unless the plant has a `workload`. `asyncmoe plan` estimates the weight sync (`sync.seconds`); with `--nodes` it also prints the command
that simulates its split.

Response lengths can also come from a run: `workload=RUN_DIR` draws them from the groups that the run kept (`telemetry.samples`). The run's
report has the seconds of training, sync and pause.

```
asyncmoe simulate my-plant.yaml workload=runs/mine engines.count=96
```

The simulation is simple: step times do not grow with context length, prefill takes no time unless `engines.prefill_s` is set, requests are
served in order of arrival, engines pause for a new version (even if a run has `rollout.interruption: drain`), and nothing fails. So measure
with contexts of the usual length, and set `engines.max_running` to the number of requests whose keys and values fit into memory.

The output compares the modes async, one_step_off and sync on the plant. It also has the largest speed-up that stragglers allow in theory,
and the number of generating GPUs that reaches it (`asyncmoe/simulate/laws.py` derives both). A caution says where an assumption of the
theory does not hold: a batch does not fill the engines' slots, or responses last longer than `max_staleness` steps. The last row is the
share of started responses that were dropped. `--sweep` tries the plant's split of the GPUs between engines and trainer, and other splits
that give the trainer multiples of `trainer.least_gpus`, each with `max_staleness` 1, 2, 4, 8 and the plant's value. `--json FILE` writes
the figures.

The command line can override any key. All wrong keys and values are refused at once, each with its line in the file. Keys that are left out
have their defaults; without a file, all keys do.
"""
_WORDS = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", Path: "path", type(None): "`null`", Any: "anything"}


@dataclass(frozen=True)
class Group:
    """A section: its path, its description, its own keys by path, and its subsections, all in schema order."""

    path: str
    text: str
    optional: bool
    keys: tuple[tuple[str, FieldInfo], ...]
    inner: tuple[Group, ...]


def groups(schema: type[BaseModel] = Config) -> list[Group]:
    """The top-level sections; a key outside any section is a group of its own."""
    whole = _group("", schema, False)
    found = {group.path: group for group in whole.inner}
    found |= {path: Group(path, "", False, ((path, field),), ()) for path, field in whole.keys}
    return [found[name] for name in schema.model_fields]


def every_key(schema: type[BaseModel] = Config) -> dict[str, FieldInfo]:
    """All keys by path, in reading order."""
    found: dict[str, FieldInfo] = {}
    waiting = groups(schema)
    while waiting:
        group, *waiting = waiting
        found |= dict(group.keys)
        waiting = [*group.inner, *waiting]
    return found


def _group(path: str, section: type[BaseModel], optional: bool) -> Group:
    keys: list[tuple[str, FieldInfo]] = []
    inner: list[Group] = []
    for name, field in section.model_fields.items():
        full = f"{path}.{name}" if path else name
        options = [option for option in (field.annotation, *get_args(field.annotation)) if isinstance(option, type)]
        sections = [option for option in options if issubclass(option, BaseModel)]
        if sections:
            inner.append(_group(full, sections[0], field.default is None))
        else:
            keys.append((full, field))
    return Group(path, " ".join((section.__doc__ or "").split()), optional, tuple(keys), tuple(inner))


def kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type and its bounds in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inner[0], [*metadata, *inner[1:]])
    if origin in (Union, types.UnionType):
        return ", or ".join(kind(part) for part in inner)
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in inner)
    if origin is tuple and inner[-1] is ...:
        return f"list of: {kind(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)}: {'; '.join(dict.fromkeys(map(kind, inner)))}"
    if names := [name for mark in metadata for name in getattr(mark, "names", ())]:
        return ("one of " if names[1:] else "") + ", ".join(f"`{name}`" for name in names) + ", or `package.module:name`"
    if origin is dict:
        return "mapping" if inner[1] is Any else f"mapping to: {kind(inner[1])}"
    return _WORDS[annotation] + _bounds(metadata, whole=annotation is int)


def _bounds(metadata: Sequence[Any], whole: bool) -> str:
    marks = [mark for part in metadata for mark in (part.metadata if isinstance(part, FieldInfo) else [part])]
    found = []
    for name, word in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        for bound in [getattr(mark, name) for mark in marks if getattr(mark, name, None) is not None]:
            found.append(f"at least {bound + 1}" if whole and name == "gt" else f"{word} {bound:g}")
    return f", {' and '.join(found)}" if found else ""


def default(field: FieldInfo) -> str:
    """Format a default as YAML."""
    if field.is_required():
        return "**required**"
    value = field.default
    if value in ("", (), {}):
        return "none"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{value if isinstance(value, str | Path) else json.dumps(value)}`"


def plain(text: str) -> str:
    """Escape characters that Markdown would interpret."""
    return re.sub(r"([|<>*])", r"\\\1", text)


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _contents(found: Sequence[Group]) -> Iterator[str]:
    for group in found:
        inner = ", ".join(f"[{one.path.rpartition('.')[2]}](#{anchor(one.path)})" for one in group.inner)
        yield f"- [{group.path}](#{anchor(group.path)})" + (f": {inner}" if inner else "")


def _section(group: Group, level: int) -> Iterator[str]:
    yield f"{'#' * level} {group.path}\n"
    if group.text:
        yield plain(group.text) + (" *Optional.*" if group.optional else "") + "\n"
    if group.keys:
        yield "| key | type | default | description |\n|---|---|---|---|"
        for path, field in group.keys:
            words = kind(field.annotation, field.metadata)
            yield f"| `{path}` | {words} | {default(field)} | {plain(' '.join((field.description or '').split()))} |"
        yield ""
    for inner in group.inner:
        yield from _section(inner, level + 1)


def generate() -> str:
    """Return the whole page."""
    found = groups()
    parts = [HEAD, *_contents(found), ""]
    for group in found:
        parts += _section(group, 2)
    return "\n".join(parts)


def generate_plant() -> str:
    """Return the whole page on plants."""
    whole = _group("", Plant, False)
    parts = [HEAD_PLANT, *_section(Group("Plant", whole.text, False, whole.keys, ()), 2)]
    for group in whole.inner:
        parts += _section(group, 2)
    return "\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(generate())
    OUT_PLANT.write_text(generate_plant())
