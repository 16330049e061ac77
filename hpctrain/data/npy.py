"""Arrays in NumPy's files.

`.npy`   of any size: each rank reads only the rows of its own batches
`.npz`   keys `x` and `y`, and `x_test` and `y_test` for a test set; each rank reads all
"""

from __future__ import annotations

import contextlib
import difflib
import io
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

import numpy as np
import pydantic

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief, expanded, open_regular
from hpctrain.core.opening import NAMED
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import OBJECTS_REMEDY, Dataset, Split, make_dataset, make_split
from hpctrain.data.stored import StoredSamples, map_array, unpack_array

_HINT = "write it with numpy.save(path, array)"
_NPZ_KEYS = ("x", "y", "x_test", "y_test")
_NPZ_HINT = "write it with numpy.savez(path, x=..., y=...)"
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_COMPRESSION_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  #: those that NumPy writes
MAX_HEADER_BYTES = 10_000  #: NumPy's limit, since headers are parsed as Python literals
_FORMATS: dict[tuple[int, int], tuple[str, Callable[..., Any]]] = {
    (1, 0): ("<H", np.lib.format.read_array_header_1_0),
    (2, 0): ("<I", np.lib.format.read_array_header_2_0),
}


@config.options
class NpyOptions(ArrayOptions):
    """`[data] kind = "npy"`: samples in file `x`, targets in file `y`; a test set is optional.

    `classes` is for labels in 0 .. classes - 1.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("x", "y", "x_test", "y_test")
    x: str
    y: str
    x_test: str | None = None
    y_test: str | None = None
    classes: Annotated[int, pydantic.Field(ge=1)] | None = None

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return sets that read their files lazily; raise UsageError for an invalid file."""
        if (self.x_test is None) != (self.y_test is None):
            raise UsageError("[data] expected x_test and y_test, seen only one")
        train, test = self._open_samples(self.x, self.y, finite), None
        if self.x_test is not None and self.y_test is not None:
            test = self._open_samples(self.x_test, self.y_test, finite)
        return self.finish(make_split(train, test, self.x, self.classes), seed)

    def _open_samples(self, x: str, y: str, finite: bool) -> StoredSamples:
        return StoredSamples(map_file(x), map_file(y), self.classes, f"{x}, {y}", finite)


def map_file(name: str) -> np.ndarray:
    """Return the mapped array of a file; only the header is read."""
    path = expanded(name)
    with open_regular(path, NAMED) as file:
        shape, is_fortran, dtype = read_header(file, f"{path}: expected an .npy file", _HINT)
        if is_fortran and len(shape) > 1:
            raise UsageError(
                f"{path}: expected contiguous rows (C order), seen Fortran order; write it "
                "with numpy.save(path, numpy.ascontiguousarray(array))"
            )
        return map_array(file, path, dtype, shape, file.tell())


def read_header(file: IO[bytes], prefix: str, hint: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header; return shape, Fortran order and dtype of the array behind it.

    Raises UsageError, which begins with `prefix`, for an invalid header or a dtype of no numbers.
    """
    try:
        shape, is_fortran, dtype = _parse_header(file)
    except Exception as error:  # undocumented: even RecursionError and MemoryError occur
        fault = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{prefix}, seen: {fault}; {hint}") from None
    if dtype.hasobject:
        raise UsageError(f"{prefix} of numbers, seen Python objects: {OBJECTS_REMEDY}; then {hint}")
    if dtype.names or dtype.subdtype or not dtype.itemsize:
        raise UsageError(f"{prefix} of numbers, seen {brief(dtype)}; {hint}")
    if any(dim < 0 for dim in shape):
        raise UsageError(f"{prefix} with dims of 0 or more, seen {brief(shape)}; {hint}")
    return tuple(map(int, shape)), is_fortran, dtype


def _parse_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in _FORMATS:
        raise ValueError(f"version {version}, which this hpctrain does not read")
    length_format, parse = _FORMATS[version]
    length_bytes = file.read(struct.calcsize(length_format))
    (length,) = struct.unpack(length_format, length_bytes)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, which has {MAX_HEADER_BYTES} at most")
    with warnings.catch_warnings():  # about numbers of Python 2, or backslashes in damaged text
        warnings.simplefilter("ignore")
        shape, is_fortran, dtype = _retry_parse(parse, length_bytes + file.read(length))
    return shape, is_fortran, dtype


def _retry_parse(parse: Callable[..., Any], header_bytes: bytes) -> Any:
    """Call `parse` on `header_bytes`, with retries because of a bug in CPython 3.11.

    CPython miscounts the depth of an expression while two threads parse (gh-106905).
    """
    for _ in range(99):
        with contextlib.suppress(SystemError):
            return parse(io.BytesIO(header_bytes))
    return parse(io.BytesIO(header_bytes))


@config.options
class NpzOptions(ArrayOptions):
    """`[data] kind = "npz"`: the file at `path`."""

    PATHS: ClassVar[tuple[str, ...]] = ("path",)
    path: str

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return the arrays of the file as sets; raise UsageError for an invalid file."""
        arrays = read_arrays(expanded(self.path))
        train = _dataset_from(arrays, "x", "y", self.path, finite)
        has_test = "x_test" in arrays
        test = _dataset_from(arrays, "x_test", "y_test", self.path, finite) if has_test else None
        return self.finish(make_split(train, test, self.path), seed)


def _dataset_from(
    arrays: dict[str, np.ndarray], x: str, y: str, path: str, finite: bool
) -> Dataset:
    source = path if x == "x" else f"{path} ({x}, {y})"
    return make_dataset(arrays[x], arrays[y], source, finite)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return `x`, `y` and, if they are there, `x_test`, `y_test`; raise UsageError."""
    with open_regular(path, NAMED) as file:
        try:
            if file.read(4) not in _MAGIC:  # zipfile accepts any bytes in front
                raise zipfile.BadZipFile("it does not begin as a zip file does")
            with zipfile.ZipFile(file) as archive:
                member_names = {name.removesuffix(".npy"): name for name in archive.namelist()}
                keys = _required_keys(path, list(member_names))
                return {key: _read_array(path, archive, member_names[key]) for key in keys}
        except UsageError:
            raise
        except Exception as error:  # zipfile and zlib do not document errors of damaged bytes
            raise UsageError(
                f"{path}: expected a whole .npz file, seen: {error}; copy it again, or {_NPZ_HINT}"
            ) from None


def _read_array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of the archive; unpack no more bytes than its header announces."""
    if archive.getinfo(name).compress_type not in _COMPRESSION_METHODS:
        raise UsageError(
            f"{path}: expected '{name}' stored or deflated, seen otherwise; {_NPZ_HINT}"
        )
    with archive.open(name) as stream:
        prefix = f"{path}: expected '{name}' to be an array"
        shape, is_fortran, dtype = read_header(stream, prefix, _NPZ_HINT)
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
    names_by_casefold = {name.casefold(): name for name in names if name not in _NPZ_KEYS}
    nearest_names = difflib.get_close_matches(key, names_by_casefold, n=1, cutoff=0.2)
    hint = (
        f"is it '{names_by_casefold[nearest_names[0]]}'? then rename it"
        if nearest_names
        else _NPZ_HINT
    )
    names_text = ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
    return f"{path}: expected an array '{key}', seen: {names_text or 'none'}; {hint}"
