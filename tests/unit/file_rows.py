"""The same twenty rows, as files of text have them: texts that readers like to take for numbers, dates, missing values or ends of lines."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

TEXTS = ("00501", "NA", "null", "NaN", "True", "1e5", "2024-01-05", "2024-01-05T10:00:00Z", "a\nb", "a\r\nb", 'say "hi", then', "日本 é 😀")
TEXTS += (" padded ", "x\u2028y", "tab\tbed", "-0", "1,234", "it's", "1_000", "[1]")

FLAT = [{"question": text, "reward_model.ground_truth": TEXTS[-n], "level": TEXTS[n - 7]} for n, text in enumerate(TEXTS)]
"""As tables have them, whose columns cannot nest."""
NESTED: list[dict[str, Any]] = [
    {"question": row["question"], "reward_model": {"ground_truth": row["reward_model.ground_truth"]}, "level": row["level"]} for row in FLAT
]
KEYS = {"question": "question", "answer": "reward_model.ground_truth", "keep": ["level"]}
"""task.columns"""

CALLS: list[Any] = [{"function": {"name": "f", "arguments": one}} for one in ({"x": "2024-01-05"}, {"y": "007"})]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "3", "tool_call_id": "0", "name": "f"},
    {"role": "user", "content": "so?"},
]
"""Messages with different keys: Arrow gives each of them the keys of all."""


def text_of(suffix: str, rows: list[dict[str, Any]]) -> bytes:
    """A file's content; ".lines.json" has a row per line."""
    if suffix in (".csv", ".tsv"):
        file = io.StringIO(newline="")
        table = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
        table.writerows([rows[0], *(row.values() for row in rows)])
        return file.getvalue().encode()
    if suffix == ".json":
        return json.dumps(rows, ensure_ascii=False, indent=1).encode()
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def written(path: Path) -> Path:
    """Write the rows in the form that the file's suffix names."""
    name = path.name.removesuffix(".gz")
    content = text_of(name[name.index(".") :], FLAT if name.endswith(("csv", "tsv")) else NESTED)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path
