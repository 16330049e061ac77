"""Arrays in a `.npz` file: keys `x` and `y`, and `x_test` and `y_test` if there is a test set."""

from __future__ import annotations

import difflib
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from hpctrain import config
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Dataset, Split, checked, split
from hpctrain.errors import UsageError

_KEYS = ("x", "y", "x_test", "y_test")
_HINT = "write it with numpy.savez(path, x=..., y=...)"
# What NumPy and zipfile raise on files whose bytes were cut or changed at random.
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


@config.options
class NpzOptions(AugmentOptions):
    """`[data] kind = "npz"`: the file at `path`, seen from where the job was started."""

    path: str

    def load(self, seed: int) -> Split:
        """Return what the file holds; UsageError names the file, what was expected and seen."""
        arrays = _read(Path(self.path).expanduser())
        train = _pair(arrays, "x", "y", self.path)
        test = _pair(arrays, "x_test", "y_test", self.path) if "x_test" in arrays else None
        return self.augmented(split(train, test, self.path), seed)


def _pair(arrays: dict[str, np.ndarray], x: str, y: str, path: str) -> Dataset:
    return checked(arrays[x], arrays[y], path if x == "x" else f"{path} ({x}, {y})")


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        seen = "a directory" if path.is_dir() else "nothing"
        raise UsageError(f"{path}: expected an .npz file, seen {seen}; check [data] path")
    try:
        # Asked first, since NumPy takes any other file for pickled objects and says so.
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("no end of a zip file is in it")
        # Pickled objects would run code of whoever wrote the file.
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in _keys(path, file.files)}
    except _DAMAGE as error:
        raise UsageError(_damage(path, error)) from None


def _keys(path: Path, seen: list[str]) -> list[str]:
    # Half a test set is a slip, so one of its arrays asks for the other.
    test = ["x_test", "y_test"] if {"x_test", "y_test"} & set(seen) else []
    keys = ["x", "y", *test]
    for key in keys:
        if key not in seen:
            raise UsageError(_missing(path, key, seen))
    return keys


def _missing(path: Path, key: str, seen: list[str]) -> str:
    folded = {name.casefold(): name for name in seen if name not in _KEYS}
    near = difflib.get_close_matches(key, folded, n=1, cutoff=0.2)
    hint = f"is it '{folded[near[0]]}'? then rename that" if near else _HINT
    return f"{path}: expected an array '{key}', seen: {', '.join(seen) or 'none'}; {hint}"


def _damage(path: Path, error: Exception) -> str:
    if "allow_pickle" in str(error):
        return f"{path}: expected arrays of numbers, seen Python objects; {_HINT}"
    return f"{path}: expected a whole .npz file, seen: {error}; copy it again, or {_HINT}"
