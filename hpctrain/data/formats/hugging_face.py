"""Data sets of Hugging Face: Arrow tables, mapped from a folder of `save_to_disk` or an object.

Nothing is downloaded: compute nodes often have no network, and ranks would all begin to load. An
object is read where it lies, by the rows of each batch:

    `select`, `shuffle`, `filter`, `split`      its table is read by the rows that they chose
    `set_format`                                its columns are the choice; its type is not needed
    `set_transform`                             refused: a user's function would make the rows
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import unknown
from hpctrain.core.opening import NAMED
from hpctrain.data.formats import arrow
from hpctrain.data.formats.arrays import FileArray, Part, ReadRows, guarded
from hpctrain.data.formats.libraries import faults_of, load_library
from hpctrain.data.formats.samples import FileSamples, read_samples

_EXPECTED = "a data set of Hugging Face"
_REMEDY = (
    "write it with datasets.load_dataset('NAME').save_to_disk('FOLDER') where there is a network"
)
_FILES = ("dataset_dict.json", "dataset_info.json", "state.json")
_TARGETS = ("y", "label", "labels", "target", "targets")


class HuggingFaceSamples(FileSamples):
    """Samples from the columns `x` and `y` of a `datasets.Dataset`, read in place by rows.

    `x` is a column of numbers, lists of numbers (n, ...) or images, or a list of columns of numbers
    side by side. `classes` is the number of labels in `y`, by default of its ClassLabel. If
    `finite`, values that are not finite are an error when they are read. Raises UsageError for
    columns of other types, for streams, and for a data set with a transform.
    """

    def __init__(
        self, dataset: Any, x: arrow.Key, y: str, classes: int | None = None, finite: bool = True
    ):
        """Read the targets, if they are single numbers, and the first sample."""
        names, source = _names_in(dataset), _describe(dataset)
        for key in (x, y):
            arrow.must_have(key, names, source)
        parts = [
            _probe_columns(source, dataset, key, partial(_read_rows, source, dataset, key))
            for key in (x, y)
        ]
        chosen = dataset._indices  # the rows that `select` and the like chose; None for all
        rows = None if chosen is None else chosen.column(0).to_numpy().astype(np.int64, copy=False)
        x_array, y_array = (FileArray([part], rows) for part in parts)
        samples = read_samples(x_array, y_array, classes or parts[1].classes, source, finite)
        super().__init__(**vars(samples))


def as_samples(dataset: Any, finite: bool = True) -> HuggingFaceSamples:
    """Return the Samples of a `datasets.Dataset` with two columns, one of them with targets.

    Targets are the column of class labels, or one named as targets are. Raises UsageError for
    other columns, and as HuggingFaceSamples.
    """
    names = _names_in(dataset)
    labels = [name for name in names if hasattr(dataset.features[name], "num_classes")]
    targets = labels or [name for name in names if name in _TARGETS]
    if len(names) != 2 or len(targets) != 1:
        raise UsageError(
            f"{_describe(dataset)}: expected two columns, one of class labels or with the name "
            f"{', '.join(_TARGETS[:-1])} or {_TARGETS[-1]}, seen {', '.join(names)}; name them: "
            "ht.data.HuggingFaceSamples(dataset, x='...', y='...')"
        )
    (x,) = set(names) - set(targets)
    return HuggingFaceSamples(dataset, x, targets[0], finite=finite)


def probe(path: Path, keys: tuple[arrow.Key, ...], split: str | None = None) -> list[Part]:
    """Return an array for each of `keys`, a column or a list of columns, of a split.

    Raises UsageError for another folder, an unknown split, and columns of no numbers.
    """
    data = _open(path, split)
    return [
        _probe_columns(_source(path, split), data, key, partial(_open_rows, path, split, key))
        for key in keys
    ]


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


def _probe_columns(source: str, data: Any, key: arrow.Key, open_rows: Any) -> Part:
    names = arrow.must_have(key, data.column_names, source)
    if not len(data):
        raise UsageError(f"{source}: expected rows, seen none")
    with faults_of(source, _EXPECTED, _REMEDY):
        columns = _columns(source, data, key)
        classes = getattr(data.features[names[0]], "num_classes", None)
        shape = (data.data.num_rows, *columns.shape)
        return Part(columns.place, shape, columns.dtype, None, open_rows, "mapped", classes=classes)


def _source(path: Path, split: str | None) -> str:
    return f"{path} ({split})" if split else str(path)


def _columns(source: str, data: Any, key: arrow.Key) -> arrow.Columns:
    chosen = data._indices  # the rows that a filter leaves out may be of other lengths
    first = 0 if chosen is None else chosen.column(0)[0].as_py()
    table = data.data.table.slice(first, 1).select(arrow.must_have(key, data.column_names, source))
    table.validate(full=True)
    return arrow.probe_columns(data.features.arrow_schema, table, key, source, "huggingface")


def _open_rows(path: Path, split: str | None, key: arrow.Key) -> ReadRows:
    return _read_rows(_source(path, split), _open(path, split), key)


def _read_rows(source: str, data: Any, key: arrow.Key) -> ReadRows:
    """Return the function that reads columns `key` of the table below `data` by rows."""
    columns = _columns(source, data, key)
    batches = data.data.table.select([column.name for column in columns.columns]).to_batches()
    ends, checked = np.cumsum([batch.num_rows for batch in batches]), arrow.CheckedBatches(batches)

    def read(rows: np.ndarray) -> np.ndarray:
        return columns.read(arrow.take_rows(checked, ends, rows), rows)

    return guarded(read, columns.place, "a whole data set of Hugging Face")


def _names_in(data: Any) -> list[str]:
    """Return the columns that an object shows; raise UsageError for what cannot be read by rows."""
    datasets = load_library("datasets", "huggingface")
    if isinstance(data, Mapping):
        names = list(data)
        raise UsageError(
            f"data set: expected one split of a data set, seen {type(data).__name__} of "
            f"{', '.join(names)}; give dataset[{names[0] if names else 'train'!r}]"
        )
    if isinstance(data, datasets.IterableDataset):
        raise UsageError(
            "data set: expected one with indexes and a length, seen a stream (IterableDataset): "
            "its samples could not be divided among ranks; load it without streaming=True"
        )
    if not isinstance(data, datasets.Dataset):
        raise UsageError(
            f"data set: expected a datasets.Dataset, seen {type(data).__name__}; load one by "
            "datasets.load_dataset, or make one by datasets.Dataset.from_dict"
        )
    source, shown = _describe(data), data.format
    if shown["type"] == "custom":
        raise UsageError(
            f"{source}: expected rows as they are stored, seen a function of set_transform or "
            "with_transform; apply it once by dataset.map, or give a torch.utils.data.DataLoader "
            "of this data set, which calls it, with a collate_fn that returns (x, y)"
        )
    if arguments := ", ".join(f"{name}={value}" for name, value in shown["format_kwargs"].items()):
        raise UsageError(
            f"{source}: expected set_format without arguments of its type, seen {arguments}; "
            "change the dtype of a column by dataset.cast_column"
        )
    return list(data.column_names if shown["output_all_columns"] else shown["columns"])


def _describe(data: Any) -> str:
    """Return the name of an object for messages; its rows are those of the table below it."""
    name = f"data set ({data.split})" if getattr(data, "split", None) else "data set"
    return name if data._indices is None else f"{name}, before its select, shuffle or filter"
