"""Arrays in `.npy` files, of any size: each rank reads the rows of its own batches, no others."""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Annotated

import numpy as np
import pydantic

from hpctrain import config
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Split, split
from hpctrain.data.stored import Stored, mapped
from hpctrain.errors import UsageError

_HINT = "write it with numpy.save(path, array)"
# What NumPy raises on headers whose bytes were changed: they are read as Python's own literals.
_DAMAGE = (ValueError, KeyError, TypeError, SyntaxError, TokenError)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
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
        """Return sets that read when asked; UsageError names the file, what it expected and saw."""
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
    path = Path(name).expanduser()
    try:
        with open(path, "rb") as file:
            shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
            offset = file.tell()
    except OSError as error:
        raise UsageError(f"{path}: expected an .npy file: {error.strerror or error}") from None
    except _DAMAGE as error:
        raise UsageError(f"{path}: expected an .npy file, seen: {error}; {_HINT}") from None
    if fortran and len(shape) > 1:
        raise UsageError(
            f"{path}: expected rows that lie together (C order), seen Fortran order; write it with "
            "numpy.save(path, numpy.ascontiguousarray(array))"
        )
    if dtype.hasobject:
        raise UsageError(f"{path}: expected an array of numbers, seen Python objects; {_HINT}")
    return mapped(path, dtype, shape, offset)
