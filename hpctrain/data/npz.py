"""Arrays in a `.npz` file: keys `x` and `y`, and `x_test` and `y_test` if there is a test set."""

from __future__ import annotations

import difflib
import zipfile
from pathlib import Path

import numpy as np

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded, open_regular
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Dataset, Split, checked, split
from hpctrain.data.npy import header
from hpctrain.data.stored import unpacked

_KEYS = ("x", "y", "x_test", "y_test")
_HINT = "write it with numpy.savez(path, x=..., y=...)"
_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  #: those that NumPy writes


@config.options
class NpzOptions(AugmentOptions):
    """`[data] kind = "npz"`: the file at `path`, relative to the job's start folder."""

    path: str

    def load(self, seed: int) -> Split:
        """Return the arrays of the file as sets; UsageError names the file and the fault."""
        arrays = _read(expanded(self.path))
        train = _pair(arrays, "x", "y", self.path)
        test = _pair(arrays, "x_test", "y_test", self.path) if "x_test" in arrays else None
        return self.augmented(split(train, test, self.path), seed)


def _pair(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> Dataset:
    return checked(arrays[x], arrays[y], path if x == "x" else f"{path} ({x}, {y})")


def _read(path: Path) -> dict[str, np.ndarray]:
    with open_regular(path) as file:
        try:
            if file.read(4) not in _MAGIC:  # zipfile accepts any bytes in front
                raise zipfile.BadZipFile("it does not begin as a zip file does")
            with zipfile.ZipFile(file) as archive:
                names = {name.removesuffix(".npy"): name for name in archive.namelist()}
                return {key: _array(path, archive, names[key]) for key in _keys(path, list(names))}
        except UsageError:
            raise
        except Exception as error:  # zipfile and zlib document none for damaged bytes
            raise UsageError(
                f"{path}: expected a whole .npz file, seen: {error}; copy it again, or {_HINT}"
            ) from None


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array of the archive; no more is unpacked than its header announces."""
    if archive.getinfo(name).compress_type not in _METHODS:
        raise UsageError(f"{path}: expected '{name}' stored or deflated, seen otherwise; {_HINT}")
    with archive.open(name) as stream:
        shape, fortran, dtype = header(stream, f"{path}: expected '{name}' to be an array", _HINT)
        if not fortran:
            return unpacked(stream, f"{path}: {name}", dtype, shape)
        return unpacked(stream, f"{path}: {name}", dtype, shape[::-1]).transpose()


def _keys(path: Path, names: list[str]) -> list[str]:
    # Half a test set is a mistake, so one of its arrays requires the other.
    test = ["x_test", "y_test"] if {"x_test", "y_test"} & set(names) else []
    keys = ["x", "y", *test]
    for key in keys:
        if key not in names:
            raise UsageError(_missing(path, key, names))
    return keys


def _missing(path: Path, key: str, names: list[str]) -> str:
    folded = {name.casefold(): name for name in names if name not in _KEYS}
    nearest = difflib.get_close_matches(key, folded, n=1, cutoff=0.2)
    hint = f"is it '{folded[nearest[0]]}'? then rename that" if nearest else _HINT
    listed = ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
    return f"{path}: expected an array '{key}', seen: {listed or 'none'}; {hint}"
