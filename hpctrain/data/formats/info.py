"""The contents of data files: kind, arrays, labels and missing values, and a table [data] to begin.

The kind is guessed from the first bytes of a file, or the metadata in a folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.data.formats.arrays import FileArray, Part
from hpctrain.data.formats.kinds import guess_kind
from hpctrain.data.formats.options import find_paths
from hpctrain.data.idx import read_array
from hpctrain.data.npy import NpzOptions, map_file
from hpctrain.data.stored import count_bytes

READ_BYTES = 64 << 20  #: of an array that are read to look for values that are not finite
MAX_CLASSES = 100_000  #: larger integers are no labels
_X_NAMES = ("x", "images", "image", "img", "data", "features", "inputs", "input", "pixels",
            "jpg", "jpeg", "png", "npy")  # fmt: skip
_Y_NAMES = ("y", "labels", "label", "targets", "target", "class", "classes", "cls", "fine_label")
_TEST_NAMES = ("test", "validation", "val", "eval")
Probe = Callable[[Path], dict[str, Part | UsageError]]


@dataclass(frozen=True)
class ArrayInfo:
    """An array, or a column, of a set; `fault` says why it cannot be used, else it is empty."""

    key: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk_rows: int | None = None
    storage: str = ""
    size_bytes: int = 0  #: of the values, not compressed
    not_finite: int | None = None  #: values among `rows_read`, None for integers
    rows_read: int = 0
    classes: int | None = None  #: of labels in 0 .. classes - 1
    fault: str = ""


@dataclass(frozen=True)
class FileInfo:
    """The contents of a file, a folder, or files of a pattern; `table` are keys of [data]."""

    path: str
    kind: str
    files: int
    size_bytes: int
    arrays: list[ArrayInfo]
    splits: dict[str, int] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)


def examine(name: str) -> FileInfo:
    """Return the contents of the files that `name`, a path or a pattern, matches.

    Reads the labels, and up to READ_BYTES of each array. Raises UsageError for a missing or damaged
    file, or one of an unknown kind.
    """
    paths = find_paths(name)
    kind, split, splits = guess_kind(paths[0]), None, dict[str, int]()
    if kind == "huggingface":
        from hpctrain.data.formats import hugging_face

        splits = hugging_face.list_splits(paths[0])
        split = "train" if "train" in splits else next(iter(splits), None)
    probe = partial(_PROBES[kind], split=split) if kind == "huggingface" else _PROBES[kind]
    probed = [probe(path) for path in paths]
    arrays = [_describe(key, [parts.get(key) for parts in probed]) for key in probed[0]]
    size_bytes = sum(_size(path) for path in paths)
    info = FileInfo(name, kind, len(paths), size_bytes, arrays, splits)
    return FileInfo(**{**vars(info), "table": _suggest_table(info, split)})


def _probe_keyed(module: str, path: Path, **split: Any) -> dict[str, Part | UsageError]:
    """Return the arrays of a file by key; in place of an array without numbers, its fault."""
    from importlib import import_module

    reader = import_module(f"hpctrain.data.formats.{module}")
    found: dict[str, Part | UsageError] = {}
    for key in reader.list_keys(path, **split):
        try:
            (found[key],) = reader.probe(path, (key,), **split)
        except UsageError as error:
            found[key] = error
    return found


def _probe_npz(path: Path) -> dict[str, Part | UsageError]:
    split = NpzOptions(path=str(path), scale="none").load(0, finite=False)
    sets = {"": split.train, "_test": split.test}
    return {
        f"{name}{suffix}": _mapped(f"{path}: {name}", getattr(samples, name))
        for suffix, samples in sets.items()
        if samples is not None
        for name in "xy"
    }


def _mapped(place: str, array: np.ndarray) -> Part:
    return Part(place, array.shape, array.dtype, None, lambda: lambda rows: array[rows], "")


_PROBES: dict[str, Any] = {
    "npy": lambda path: {"": _mapped(str(path), map_file(str(path)))},
    "npz": _probe_npz,
    "idx": lambda path: {"": _mapped(str(path), read_array(str(path)))},
    "hdf5": partial(_probe_keyed, "hdf5"),
    "zarr": partial(_probe_keyed, "zarr_store"),
    "parquet": partial(_probe_keyed, "parquet"),
    "webdataset": partial(_probe_keyed, "tar_shards"),
    "safetensors": partial(_probe_keyed, "tensors"),
    "huggingface": partial(_probe_keyed, "hugging_face"),
}


def _describe(key: str, parts: list[Part | UsageError | None]) -> ArrayInfo:
    """Return the description of an array whose parts lie in several files."""
    for part in parts:
        if not isinstance(part, Part):
            return ArrayInfo(key, fault=str(part or "expected it in every file, seen it in some"))
    known = [part for part in parts if isinstance(part, Part)]
    first = known[0]
    try:
        array = FileArray(known)
        row_bytes = count_bytes(array.dtype, array.shape[1:])
        rows = min(len(array), max(1, READ_BYTES // max(1, row_bytes)))
        is_float = array.dtype.kind == "f"
        values = array[:rows] if is_float or prod(array.shape[1:]) == 1 else array[:1]
        not_finite = int((~np.isfinite(values)).sum()) if is_float else None
        classes = first.classes or _count_classes(values, len(array))
    except UsageError as error:
        return ArrayInfo(key, first.shape, str(first.dtype), fault=str(error))
    return ArrayInfo(
        key, array.shape, str(array.dtype), array.chunk_rows, first.note, row_bytes * len(array),
        not_finite, rows if is_float else 0, classes,
    )  # fmt: skip


def _count_classes(values: np.ndarray, n: int) -> int | None:
    """Return the number of classes if `values` (n,) can be labels."""
    if values.dtype.kind not in "iu" or len(values) < n or values.size != n or values.min() < 0:
        return None
    largest = int(values.max())
    return largest + 1 if largest < min(MAX_CLASSES, n) else None


def _size(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    total = 0
    for file in files:
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _suggest_table(info: FileInfo, split: str | None) -> dict[str, Any]:
    """Return the keys of [data] for the arrays that look like samples and like targets."""
    usable = {array.key: array for array in info.arrays if not array.fault}
    if info.kind in ("npy", "idx"):
        names = ["images", "labels"] if info.kind == "idx" else ["x", "y"]
        own, other = names if len(info.arrays[0].shape) > 1 else names[::-1]
        return {"kind": info.kind, own: info.path, other: f"the file of {other}"}
    table: dict[str, Any] = {"kind": info.kind, "path": info.path}
    if info.kind == "npz":
        return table
    x, y = _choose_arrays(info.kind, usable)
    table |= {"x": x or "the samples", "y": y or "the targets"}
    if split not in (None, "train"):
        table["split"] = split
    tests = [name for name in _TEST_NAMES if name in info.splits and name != split]
    if tests:
        return table | {"test_split": tests[0]}
    if f"{x}_test" in usable and f"{y}_test" in usable:
        return table | {"x_test": f"{x}_test", "y_test": f"{y}_test"}
    return table | {"test_share": 0.2}


def _choose_arrays(kind: str, usable: dict[str, ArrayInfo]) -> tuple[Any, str | None]:
    """Return the keys of samples and of targets: by their names, else by their shapes."""
    training = {key: array for key, array in usable.items() if not key.endswith("_test")}
    single = [key for key, array in training.items() if prod(array.shape[1:]) == 1]
    y = _choose(_Y_NAMES, single, {key: training[key] for key in single if training[key].classes})
    rest = {key: array for key, array in training.items() if key != y}
    if y:
        rest = {k: array for k, array in rest.items() if array.shape[0] == training[y].shape[0]}
    wide = {key: array for key, array in rest.items() if len(array.shape) > 1}
    x = _choose(_X_NAMES, list(wide), wide)
    return x or (list(rest) if kind in ("parquet", "huggingface") else None), y


def _choose(names: tuple[str, ...], keys: list[str], likely: dict[str, ArrayInfo]) -> str | None:
    """Return the key with one of `names`, else the largest of the `likely` arrays."""
    by_name = {key.rpartition("/")[2].casefold(): key for key in keys}
    for name in names:
        if name in by_name:
            return by_name[name]
    return max(likely, key=lambda key: likely[key].size_bytes, default=None)
