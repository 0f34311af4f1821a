"""The documentation says what is there: keys, commands, files, links, messages and figures."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer
import yaml
from pydantic import BaseModel, TypeAdapter

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import ConfigError
from asyncmoe.simulate.command import read_plant
from asyncmoe.simulate.plant import Plant
from tests.unit.command_line import whole
from tests.unit.doc_pages import PAGES, ROOT, blocks, prose, read, spans, tables

BY_NAME = {"evaluation.sets", "environment.tools.mcp"}
"""Mappings from names to sections."""
USAGE: Any = typer.BadParameter.__base__
pages = pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])


@functools.cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def keys(schema: type[BaseModel] = Config) -> Mapping[str, Any]:
    found: Mapping[str, Any] = generator().every_key(schema)
    return found


def sections(schema: type[BaseModel] = Config) -> set[str]:
    return {".".join(key.split(".")[:n]) for key in keys(schema) for n in range(1, key.count(".") + 1)}


def code(page: Path, *words: str) -> str:
    """All that is set as code on a page: spans, and the blocks of some words."""
    text = page.read_text()
    return "\n".join([*spans(text), *(block.text for block in blocks(text) if block.word in words)])


# ---------------------------------------------------------------- the configuration


def test_the_reference_is_what_the_schema_says() -> None:
    assert read("config.md") == generator().generate(), "run: make docs"
    assert read("simulate.md") == generator().generate_plant(), "run: make docs"


def test_every_key_and_every_section_is_described() -> None:
    assert [path for path, field in {**keys(), **keys(Plant)}.items() if not field.description] == []
    groups = [*generator().groups(), *generator().groups(Plant)]
    while groups:
        group = groups.pop()
        assert group.text or len(group.keys) == 1, group.path
        assert not group.text.startswith("!!! abstract"), f"{group.path}: the docstring is pydantic's, not ours"
        groups += group.inner


def accepts(key: str, value: Any, schema: type[BaseModel] = Config) -> None:
    """Raises unless the key exists and takes the value."""
    field = keys(schema)[key]
    TypeAdapter(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation).validate_python(value)


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        full = f"{path}.{name}" if path else name
        inner = list(value.values()) if full in BY_NAME else value
        if isinstance(inner, list) and full in sections():
            for section in inner:
                yield from leaves(section, full)
        elif isinstance(value, dict) and full not in keys():
            yield from leaves(value, full)
        else:
            yield full, value


@pages
def test_keys_exist_and_take_their_values(page: Path) -> None:
    schema = Plant if page.name == "simulate.md" else Config
    text = re.sub(r"^asyncmoe simulate .*", "", code(page, "", "message"), flags=re.MULTILINE)  # keys of a plant: with the commands
    for key, value in re.findall(r"(?<![\w./:-])([a-z_]+(?:\.[a-z_]+)+|train|launch)(?:=([^\s'`]+))?", text):
        if key.split(".")[0] not in schema.model_fields or key.rpartition(".")[2] in ("jsonl", "json", "yaml"):
            continue
        assert key in keys(schema) or key in sections(schema), f"{key} is no key"
        if value and value[0] not in "[{" and key in keys(schema):  # lists and mappings: with the commands
            accepts(key, yaml.safe_load(value.rstrip(":.,;")), schema)
    for block in blocks(page.read_text(), "yaml"):
        for key, value in leaves(yaml.safe_load(block.text)):
            accepts(key, value)


# ---------------------------------------------------------------- commands


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of `asyncmoe` wherever a page writes a command."""
    text = page.read_text()
    lines = [line for block in blocks(text) if block.word in ("", "sh") for line in block.text.replace("\\\n", " ").splitlines()]
    for line in [*lines, *(span for span in spans(text) if "asyncmoe " in span)]:
        if not re.search(r"(^|[\s/])asyncmoe\s", line):
            continue
        for part in re.split(r"&&|[;|>]|\s&(?:\s|$)", line.partition(" #")[0]):
            words = shlex.split(part)
            named = [n for n, word in enumerate(words) if word.rpartition("/")[2] == "asyncmoe"]
            if named:
                yield [word for word in words[named[0] + 1 :] if not re.search(r"^\[.*|^\.\.\.\]?$|\]$", word) or "=" in word]


def check(arguments: Sequence[str]) -> None:
    """Refuse a command, an option or an override that does not exist; one that is named without all that it needs may pass."""
    command = whole()
    context = command.make_context("asyncmoe", ["--help"], resilient_parsing=True)
    rest = list(arguments)
    while hasattr(command, "commands"):
        if not rest or rest[0] == "--help":
            return
        name = rest.pop(0)
        command = command.get_command(context, name)
        assert command is not None, f"asyncmoe has no command {name}"
    try:
        made = command.make_context(name, list(rest), parent=context)
    except USAGE as error:
        if type(error).__name__ != "MissingParameter":
            raise AssertionError(str(error)) from error
    else:
        if name == "simulate":
            plant = [str(ROOT / "examples" / "plant.yaml") if word == "my-plant.yaml" else word for word in made.params["arguments"] or ()]
            read_plant(plant)
    if name in ("run", "rollout", "engine") and rest and (ROOT / rest[0]).is_file():
        configuration.load(ROOT / rest[0], rest[1:])


@pages
def test_commands_are_those_of_the_command_line(page: Path) -> None:
    for arguments in commands(page):
        check(arguments)
    for module in re.findall(r"-m (asyncmoe[\w.]*)", code(page, "", "sh")):
        assert importlib.util.find_spec(module) is not None, module
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z][a-z-]+)", code(page, "", "sh")):
        assert target in targets, f"make {target}"


def test_the_check_of_commands_finds_what_is_wrong() -> None:
    for wrong in (
        ["no-such"],
        ["simulate", "max_stalenes=4"],
        ["simulate", "engines.tp=4"],
        ["plan", "--no-such", "1"],
        ["run", "examples/demo.yaml", "run.stepz=3"],
        ["bench", "no-such"],
    ):
        with pytest.raises((AssertionError, ConfigError)):
            check(wrong)
    check(["run", "examples/demo.yaml", "run.steps=3"])


# ---------------------------------------------------------------- files and links


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "asyncmoe|benchmarks|docs|examples|tests|slurm|csrc|requirements"
    for name in re.findall(rf"(?<![\w:./*-])((?:{folders})/[\w./*-]*)", code(page, "", "sh")):
        assert list(ROOT.glob(name.rstrip("./"))), name


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(file.read_text()), re.MULTILINE)
            assert anchor in map(generator().anchor, headings), target


# ---------------------------------------------------------------- figures


def at(document: Any, place: str) -> float:
    """The number at a place like `cases[0].seconds.total`."""
    for name, index in re.findall(r"([\w-]+)|\[(\d+)\]", place):
        document = document[name] if name else document[int(index)]
    return float(document)


def test_figures_are_those_of_the_results() -> None:
    page = read("measurements.md")
    named = re.findall(r"^File: `(benchmarks/results/[\w.-]+)`$", page, re.MULTILINE)
    results = {str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert set(named) == results, "docs/measurements.md has a table of every result, and of nothing else"
    units = {"%": 1e-2, "MB": 1e6, "GB": 1e9}
    for file, rows in zip(named, tables(page), strict=False):
        document = json.loads((ROOT / file).read_text())
        for what, figure, place in rows:
            shown, _, unit = figure.partition(" ")
            found = at(document, place.strip("`")) / units.get(unit, 1.0)
            digits = len(shown.partition(".")[2])
            assert round(found, digits) == float(shown), f"{file}: {what}: {figure}, but the file says {found}"


def test_the_page_on_gpus_names_tests_there_are() -> None:
    text = (ROOT / "docs" / "gpus.md").read_text().partition("| what holds |")[2]
    files = set(re.findall(r"(?:tests/\w+/)?test_\w+\.py", text))
    missing = [file for file in files if not (ROOT / (file if "/" in file else f"tests/unit/{file}")).exists()]
    every = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing += [name for name in re.findall(r"`(test_\w+)…?`", text) if f"def {name}" not in every]
    assert missing == []
    assert len(files) > 10
