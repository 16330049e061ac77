"""Arrays in `.npy` files, of any size: each rank reads the rows of its own batches, no others."""

from __future__ import annotations

import contextlib
import io
import struct
import warnings
from collections.abc import Callable
from typing import IO, Annotated, Any

import numpy as np
import pydantic

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief, expanded, open_regular
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Split, split
from hpctrain.data.stored import Stored, mapped

_HINT = "write it with numpy.save(path, array)"
MOST_BYTES = 10_000  #: of a header, as in NumPy: they are parsed as Python's own literals
_FORMATS: dict[tuple[int, int], tuple[str, Callable[..., Any]]] = {
    (1, 0): ("<H", np.lib.format.read_array_header_1_0),
    (2, 0): ("<I", np.lib.format.read_array_header_2_0),
}


@config.options
class NpyOptions(AugmentOptions):
    """`[data] kind = "npy"`: samples in file `x`, labels in file `y`; a test set is optional.

    `classes` is given, since finding the largest label would mean to read them all.
    """

    x: str
    y: str
    x_test: str | None = None
    y_test: str | None = None
    classes: Annotated[int, pydantic.Field(ge=1)]

    def load(self, seed: int) -> Split:
        """Return sets that read their files lazily; UsageError names the file and the fault."""
        if (self.x_test is None) != (self.y_test is None):
            raise UsageError("[data] expected x_test and y_test, seen one of them")
        train, test = self._stored(self.x, self.y), None
        if self.x_test is not None and self.y_test is not None:
            test = self._stored(self.x_test, self.y_test)
        return self.augmented(split(train, test, self.x, self.classes), seed)

    def _stored(self, x: str, y: str) -> Stored:
        return Stored(_mapped(x), _mapped(y), self.classes, f"{x}, {y}")


def _mapped(name: str) -> np.ndarray:
    """Return the array of a file; only its header is read."""
    path = expanded(name)
    with open_regular(path) as file:
        shape, fortran, dtype = header(file, f"{path}: expected an .npy file", _HINT)
        if fortran and len(shape) > 1:
            raise UsageError(
                f"{path}: expected rows that lie together (C order), seen Fortran order; write it "
                "with numpy.save(path, numpy.ascontiguousarray(array))"
            )
        return mapped(file, path, dtype, shape, file.tell())


def header(file: IO[bytes], prefix: str, hint: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, Fortran order and dtype of the array whose bytes then follow in `file`.

    Raises UsageError, which begins with `prefix`, for an invalid header, or one not of numbers.
    """
    try:
        shape, fortran, dtype = _parsed(file)
    except Exception as error:  # NumPy documents none; RecursionError and MemoryError occur, too
        fault = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{prefix}, seen: {fault}; {hint}") from None
    if dtype.hasobject:
        raise UsageError(f"{prefix} of numbers, seen Python objects; {hint}")
    if dtype.names or dtype.subdtype or not dtype.itemsize:
        raise UsageError(f"{prefix} of numbers, seen {brief(dtype)}; {hint}")
    if any(dim < 0 for dim in shape):
        raise UsageError(f"{prefix} with dims of 0 or more, seen {brief(shape)}; {hint}")
    return tuple(map(int, shape)), fortran, dtype


def _parsed(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in _FORMATS:
        raise ValueError(f"version {version}, which this hpctrain does not read")
    layout, parse = _FORMATS[version]
    size = file.read(struct.calcsize(layout))
    (length,) = struct.unpack(layout, size)
    if length > MOST_BYTES:
        raise ValueError(f"a header of {length} bytes, which has {MOST_BYTES} at most")
    with warnings.catch_warnings():  # of Python 2's numbers, of backslashes in damaged text
        warnings.simplefilter("ignore")
        shape, fortran, dtype = _retried(parse, size + file.read(length))
    return shape, fortran, dtype


def _retried(parse: Callable[..., Any], text: bytes) -> Any:
    """Return `parse` of `text`, retried because of a bug in CPython 3.11.

    It miscounts the depth of an expression while two threads parse one each (gh-106905).
    """
    for _ in range(99):
        with contextlib.suppress(SystemError):
            return parse(io.BytesIO(text))
    return parse(io.BytesIO(text))
