"""Rows of data sets: text files, and what Hugging Face's `datasets` reads: Parquet and Arrow files, saved data sets, and those on the hub.

`datasets` does not read text files here, because it would guess their types. What it reads is memory-mapped: only the indices of the kept
rows are in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from asyncmoe import installed, plugins
from asyncmoe.config.task import ColumnsSection, WeightedSource
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import hub
from asyncmoe.rollout.tasks import text_files
from asyncmoe.rollout.tasks.jsonl import example_of, examples
from asyncmoe.rollout.tasks.rows import Keep, keeps, none_left
from asyncmoe.rollout.tasks.types import Example, Finite

BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
"""`datasets`' builder by the suffix of a file."""
SUFFIXES = (*text_files.READERS, *BUILDERS)
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""


class DatasetRows:
    """The kept rows of a data set. See `Finite`.

    Args:
        data: a `datasets.Dataset`.
        name: name of the data set, for messages.
    """

    def __init__(self, data: Any, name: str, columns: ColumnsSection, keep: Keep | None) -> None:
        self._data, self._name, self._columns = data, name, columns
        self._kept = array("q", self._checked(keep))
        if not self._kept:
            raise none_left(name, len(data))

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Example:
        row = self._kept[index]
        return example_of(f"{self._name} row {row}", self._data[row], self._columns)

    def _checked(self, keep: Keep | None) -> Iterator[int]:
        for row, values in enumerate(self._data):
            where = f"{self._name} row {row}"
            if keep is None or keep(where, values):
                example_of(where, values, self._columns)
                yield row


def read(source: WeightedSource, key: str) -> Finite:
    """Read and check a data set.

    Args:
        key: section of the source, for messages.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: no such data set or split, the hub cannot be reached, a file that cannot be read, a column that is missing or of another
            type, or no row left; names row and column.
    """
    path = source.path
    assert path is not None
    name, columns, keep = f"{key}.path {path}", source.columns or ColumnsSection(), keeps(source, key)
    data = _split({"train": [path]}, source, key) if _is_text(path) and not path.is_dir() else _load(source, key)
    if isinstance(data, list):
        return examples(chain.from_iterable(text_files.rows(one, f"{key}.path") for one in data), name, columns, keep)
    return DatasetRows(_only(data, columns, source), name, columns, keep)


def _is_text(path: Path) -> bool:
    return text_files.kind(path) in text_files.READERS


def _only(data: Any, columns: ColumnsSection, source: WeightedSource) -> Any:
    """Return the data set without columns that nothing reads: images and audio would be decoded in vain."""
    if columns.keep is None or source.filter is not None:
        return data
    asked = {columns.question, columns.answer or "", *columns.keep, *(source.where or {})}
    wanted = {*asked, *(name.partition(".")[0] for name in asked)}
    return data.select_columns([name for name in data.column_names if name in wanted])


def _load(source: WeightedSource, key: str) -> Any:
    """Return a `datasets.Dataset`, or a list of text files. Raises as `read`."""
    path = source.path
    assert path is not None
    try:
        import datasets
    except ImportError as error:
        hint = f"run: {installed.fix('datasets')}; {', '.join(text_files.READERS)} files need no package"
        raise ConfigError(
            f"{key}.kind", got=f"dataset without its package ({error})", expected="the package `datasets`", hint=hint
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if path.is_dir() and any((path / name).is_file() for name in _SAVED):
            data = datasets.load_from_disk(str(path))
            return _split(data if hasattr(data, "keys") else {"train": data}, source, key)
        split = source.split or "train"
        if path.is_dir():
            found = datasets.load_dataset_builder(str(path), name=source.subset).config.data_files or {}
            if found and all(_is_text(Path(file)) for files in found.values() for file in files):
                return _split({str(name): [*map(Path, files)] for name, files in found.items()}, source, key)
        given = _file(path, key) if path.is_file() else (str(path if path.is_dir() else _on_hub(path, key)), {})
        return datasets.load_dataset(given[0], split=split, name=source.subset, **given[1])
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"{key}.path {path}", got=_told(error), expected="a data set of rows, a subset and a split that `datasets` can read"
        ) from error


def _file(path: Path, key: str) -> tuple[str, dict[str, Any]]:
    """Return `datasets`' builder of a file and its argument."""
    builder = BUILDERS.get(path.suffix.lower())
    if builder is None:
        expected = f"one of {', '.join(SUFFIXES)}; text files also with .gz"
        raise DataError(f"{key}.path {path}", got=f"the suffix {path.suffix!r}", expected=expected)
    if path.stat().st_size == 0:
        raise DataError(f"{key}.path {path}", got="an empty file", expected="rows")
    return builder, {"data_files": str(path)}


def _on_hub(path: Path, key: str) -> Path:
    if not hub.is_id(path) or text_files.kind(path) in SUFFIXES:
        raise DataError(f"{key}.path {path}", got="no such file or directory", expected="an existing path, or org/name on the hub")
    hub.check_reachable("dataset", str(path), f"{key}.path")
    return path


def _split(splits: Mapping[str, Any], source: WeightedSource, key: str) -> Any:
    """Return the split of a source; text files, and a data set that was saved without splits, have only `train`."""
    split = source.split or "train"
    if split not in splits:
        raise DataError(f"{key}.split", got=split, expected=f"one of {', '.join(splits)}, the splits of {source.path}")
    return splits[split]


def _told(error: Exception) -> str:
    """Format an exception in one line, with its cause, which says what is wrong with a file."""
    return "; ".join(dict.fromkeys(plugins.told(one)[:300] for one in (error, error.__cause__ or error.__context__) if one is not None))
