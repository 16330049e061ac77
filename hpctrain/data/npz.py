"""Arrays in a `.npz` file: keys `x` and `y`, and `x_test` and `y_test` for a test set."""

from __future__ import annotations

import difflib
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded, open_regular
from hpctrain.core.opening import NAMED
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Dataset, Split, make_dataset, make_split
from hpctrain.data.npy import read_header
from hpctrain.data.stored import unpack_array

_KEYS = ("x", "y", "x_test", "y_test")
_HINT = "write it with numpy.savez(path, x=..., y=...)"
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  #: those that NumPy writes


@config.options
class NpzOptions(ArrayOptions):
    """`[data] kind = "npz"`: the file at `path`."""

    PATHS: ClassVar[tuple[str, ...]] = ("path",)
    path: str

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return the arrays of the file as sets; raise UsageError for an invalid file."""
        arrays = _read_arrays(expanded(self.path))
        train = _dataset_from(arrays, "x", "y", self.path, finite)
        has_test = "x_test" in arrays
        test = _dataset_from(arrays, "x_test", "y_test", self.path, finite) if has_test else None
        return self.finish(make_split(train, test, self.path), seed)


def _dataset_from(
    arrays: dict[str, np.ndarray], x: str, y: str, path: str, finite: bool
) -> Dataset:
    source = path if x == "x" else f"{path} ({x}, {y})"
    return make_dataset(arrays[x], arrays[y], source, finite)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with open_regular(path, NAMED) as file:
        try:
            if file.read(4) not in _MAGIC:  # zipfile accepts any bytes in front
                raise zipfile.BadZipFile("it does not begin as a zip file does")
            with zipfile.ZipFile(file) as archive:
                names = {name.removesuffix(".npy"): name for name in archive.namelist()}
                keys = _required_keys(path, list(names))
                return {key: _read_array(path, archive, names[key]) for key in keys}
        except UsageError:
            raise
        except Exception as error:  # zipfile and zlib do not document errors of damaged bytes
            raise UsageError(
                f"{path}: expected a whole .npz file, seen: {error}; copy it again, or {_HINT}"
            ) from None


def _read_array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of the archive; unpack no more bytes than its header announces."""
    if archive.getinfo(name).compress_type not in _COMPRESSION_METHODS:
        raise UsageError(f"{path}: expected '{name}' stored or deflated, seen otherwise; {_HINT}")
    with archive.open(name) as stream:
        prefix = f"{path}: expected '{name}' to be an array"
        shape, is_fortran, dtype = read_header(stream, prefix, _HINT)
        if not is_fortran:
            return unpack_array(stream, f"{path}: {name}", dtype, shape)
        return unpack_array(stream, f"{path}: {name}", dtype, shape[::-1]).transpose()


def _required_keys(path: Path, names: list[str]) -> list[str]:
    # A test set with only one of its arrays is a mistake, so one requires the other.
    test_keys = ["x_test", "y_test"] if {"x_test", "y_test"} & set(names) else []
    keys = ["x", "y", *test_keys]
    for key in keys:
        if key not in names:
            raise UsageError(_missing_array_message(path, key, names))
    return keys


def _missing_array_message(path: Path, key: str, names: list[str]) -> str:
    names_by_casefold = {name.casefold(): name for name in names if name not in _KEYS}
    nearest_names = difflib.get_close_matches(key, names_by_casefold, n=1, cutoff=0.2)
    hint = (
        f"is it '{names_by_casefold[nearest_names[0]]}'? then rename it" if nearest_names else _HINT
    )
    listing = ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
    return f"{path}: expected an array '{key}', seen: {listing or 'none'}; {hint}"
