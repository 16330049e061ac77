"""Arrays in `.npy` files of any size: each rank reads only the rows of its own batches."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
from collections.abc import Callable
from typing import IO, Annotated, Any, ClassVar

import numpy as np
import pydantic

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief, expanded, open_regular
from hpctrain.core.opening import NAMED
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import OBJECTS_REMEDY, Split, make_split
from hpctrain.data.stored import StoredSamples, map_array

_HINT = "write it with numpy.save(path, array)"
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
        return StoredSamples(_map_file(x), _map_file(y), self.classes, f"{x}, {y}", finite)


def _map_file(name: str) -> np.ndarray:
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
    size = file.read(struct.calcsize(length_format))
    (length,) = struct.unpack(length_format, size)
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes, which has {MAX_HEADER_BYTES} at most")
    with warnings.catch_warnings():  # about numbers of Python 2, or backslashes in damaged text
        warnings.simplefilter("ignore")
        shape, is_fortran, dtype = _retry_parse(parse, size + file.read(length))
    return shape, is_fortran, dtype


def _retry_parse(parse: Callable[..., Any], header_bytes: bytes) -> Any:
    """Call `parse` on `header_bytes`, with retries because of a bug in CPython 3.11.

    CPython miscounts the depth of an expression while two threads parse (gh-106905).
    """
    for _ in range(99):
        with contextlib.suppress(SystemError):
            return parse(io.BytesIO(header_bytes))
    return parse(io.BytesIO(header_bytes))
