"""The pages of the documentation, and their contents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


_BAR = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Block:
    """A fenced block: the word after its opening, "" where there is none, and its lines."""

    word: str
    text: str


def read(name: str) -> str:
    """A page of `docs`."""
    return (ROOT / "docs" / name).read_text()


def blocks(text: str, word: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or only those with a word."""
    found = [Block(*match.groups()) for match in _FENCE.finditer(text)]
    return [block for block in found if word in (None, block.word)]


def spans(text: str) -> list[str]:
    """Text between single backticks, outside of blocks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(text))


def prose(text: str) -> str:
    """A page without its blocks."""
    return _FENCE.sub("", text)


def files(text: str) -> dict[str, str]:
    """Python files of a page, by the name in their first line."""
    return {block.text.partition("\n")[0].removeprefix("# "): block.text for block in blocks(text, "python")}


def tables(text: str) -> list[list[list[str]]]:
    """Tables, as rows of cells, without headers; an escaped bar is text."""
    bodies = re.findall(r"^\|.*\n\|[-|]+\|\n((?:^\|.*\n)+)", text, re.MULTILINE)
    return [[[cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]] for line in body.splitlines()] for body in bodies]
