"""Rows of data sets that Hugging Face's `datasets` reads: files, saved data sets, and the hub.

A data set is memory-mapped: only the indices of the kept rows are in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncmoe import installed, plugins
from asyncmoe.config.task import ColumnsSection, WeightedSource
from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import hub
from asyncmoe.rollout.tasks.jsonl import example_of
from asyncmoe.rollout.tasks.rows import Keep, keeps, none_left
from asyncmoe.rollout.tasks.types import Example

BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""`datasets`' builder by the suffix of a file."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote."""


class DatasetRows:
    """The kept rows of a data set. See `Finite`.

    Args:
        data: a `datasets.Dataset`.
        name: of the data set, for messages.
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


def read(source: WeightedSource, key: str) -> DatasetRows:
    """Read and check a data set.

    Args:
        key: section of the source, for messages.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: no such data set or split, the hub cannot be reached, a file that `datasets` cannot read, a column that is missing or of
            another type, or no row left; names row and column.
    """
    columns = source.columns or ColumnsSection()
    return DatasetRows(_only(_load(source, key), columns, source), f"{key}.path {source.path}", columns, keeps(source, key))


def _only(data: Any, columns: ColumnsSection, source: WeightedSource) -> Any:
    """Return the data set without columns that nothing reads: images and audio would be decoded in vain."""
    if columns.keep is None or source.filter is not None:
        return data
    wanted = {columns.question, columns.answer, *columns.keep, *(source.where or {})}
    return data.select_columns([name for name in data.column_names if name in wanted])


def _load(source: WeightedSource, key: str) -> Any:
    """Return a `datasets.Dataset`. Raises as `read`."""
    path = source.path
    assert path is not None
    try:
        import datasets
    except ImportError as error:
        hint = f"run: {installed.fix('datasets')}; JSONL files need nothing with kind=jsonl"
        raise ConfigError(
            f"{key}.kind", got=f"dataset without its package ({error})", expected="`datasets` installed", hint=hint
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if path.is_dir() and any((path / name).is_file() for name in _SAVED):
            return _split(datasets.load_from_disk(str(path)), source, key)
        arguments = _local(path, source, key) if path.exists() else _on_hub(path, key)
        split = source.split or "train"
        return datasets.load_dataset(*arguments[0], split=split, name=source.subset, **arguments[1])
    except UserError:
        raise
    except Exception as error:
        raise DataError(
            f"{key}.path {path}", got=_told(error), expected="a data set of rows, a subset and a split that `datasets` can read"
        ) from error


def _local(path: Path, source: WeightedSource, key: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    if path.is_dir():
        return (str(path),), {}
    builder = BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(f"{key}.path {path}", got=f"the suffix {path.suffix!r}", expected=", ".join(BUILDERS))
    if path.stat().st_size == 0:
        raise DataError(f"{key}.path {path}", got="an empty file", expected="rows")
    given: dict[str, Any] = {"data_files": str(path)}
    columns = source.columns or ColumnsSection()
    if builder == "csv":
        # Keep text as written: 007 and True are neither a number nor a truth value.
        given["converters"] = {name: str for name in (columns.question, columns.answer) if name is not None}
    return (builder,), given


def _on_hub(path: Path, key: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    if not hub.is_id(path) or path.suffix.lower() in BUILDERS:
        raise DataError(f"{key}.path {path}", got="no such file or directory", expected="one that exists, or org/name on the hub")
    hub.check_reachable("dataset", str(path), f"{key}.path")
    return (str(path),), {}


def _split(data: Any, source: WeightedSource, key: str) -> Any:
    """Return the split of a saved data set; one that was saved without splits has only `train`."""
    splits = data if hasattr(data, "keys") else {"train": data}
    split = source.split or "train"
    if split not in splits:
        raise DataError(f"{key}.split", got=split, expected=f"one of {', '.join(splits)}, which {source.path} has")
    return splits[split]


def _told(error: Exception) -> str:
    """Format an exception in one line, with its cause, which says what is wrong with a file."""
    return "; ".join(dict.fromkeys(plugins.told(one)[:300] for one in (error, error.__cause__ or error.__context__) if one is not None))
