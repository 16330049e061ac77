"""Data sets of Hugging Face in a folder, as `save_to_disk` writes it: mapped Arrow files.

Nothing is downloaded: compute nodes often have no network, and ranks would all begin to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import unknown
from hpctrain.core.opening import NAMED
from hpctrain.data.formats import arrow
from hpctrain.data.formats.arrays import Part, ReadRows, guarded
from hpctrain.data.formats.libraries import faults_of, load_library

_EXPECTED = "a data set of Hugging Face"
_REMEDY = (
    "write it with datasets.load_dataset('NAME').save_to_disk('FOLDER') where there is a network"
)
_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")


def probe(path: Path, keys: tuple[arrow.Key, ...], split: str | None = None) -> list[Part]:
    """Return an array for each of `keys`, a column or a list of columns, of a split.

    Raises UsageError for another folder, an unknown split, and columns of no numbers.
    """
    data = _open(path, split)
    return [_probe_columns(path, split, data, key) for key in keys]


def list_keys(path: Path, split: str | None = None) -> list[str]:
    """Return the names of a split's columns."""
    return list(_open(path, split).column_names)


def list_splits(path: Path) -> dict[str, int]:
    """Return the number of rows of each split; none for a data set without splits."""
    data = _load(path)
    return {name: len(item) for name, item in data.items()} if isinstance(data, dict) else {}


def _load(path: Path) -> Any:
    if not path.is_dir() or not any((path / name).exists() for name in _FILES):
        seen_text = "a folder without it" if path.is_dir() else "no folder"
        raise UsageError(f"{path}: expected a folder with {_EXPECTED}, seen {seen_text}; {_REMEDY}")
    for file in path.rglob("*"):  # the library would wait for a FIFO
        if not file.is_dir():
            open_regular(file, NAMED).close()
    datasets = load_library("datasets", "huggingface")
    with faults_of(str(path), _EXPECTED, _REMEDY):
        return datasets.load_from_disk(str(path))


def _open(path: Path, split: str | None) -> Any:
    data = _load(path)
    if not isinstance(data, dict):
        if split is not None:
            raise UsageError(f"{path}: expected a split {split!r}, seen no splits; leave split out")
        return data
    name = "train" if split is None else split
    if name not in data:
        raise UsageError(unknown(f"split in {path}:", name, data))
    return data[name]


def _probe_columns(path: Path, split: str | None, data: Any, key: arrow.Key) -> Part:
    source = _source(path, split)
    names = arrow.must_have(key, data.column_names, source)
    if not len(data):
        raise UsageError(f"{source}: expected rows, seen none")
    with faults_of(source, _EXPECTED, _REMEDY):
        columns = _columns(source, data, key)
        classes = getattr(data.features[names[0]], "num_classes", None)
        shape, open_rows = (len(data), *columns.shape), partial(_open_rows, path, split, key)
        return Part(columns.place, shape, columns.dtype, None, open_rows, "mapped", classes=classes)


def _source(path: Path, split: str | None) -> str:
    return f"{path} ({split})" if split else str(path)


def _columns(source: str, data: Any, key: arrow.Key) -> arrow.Columns:
    names = arrow.must_have(key, data.column_names, source)
    first = _table(data, names, np.zeros(1, np.int64))
    return arrow.probe_columns(data.features.arrow_schema, first, key, source, "huggingface")


def _table(data: Any, names: Sequence[str], rows: np.ndarray) -> Any:
    return data.with_format("arrow", columns=list(names))[rows.tolist()]


def _open_rows(path: Path, split: str | None, key: arrow.Key) -> ReadRows:
    data, source = _open(path, split), _source(path, split)
    columns = _columns(source, data, key)
    names = [column.name for column in columns.columns]

    def read(rows: np.ndarray) -> np.ndarray:
        return columns.read(_table(data, names, rows), rows)

    return guarded(read, columns.place, "a whole data set of Hugging Face")
