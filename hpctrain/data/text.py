"""Text as bytes, for models that predict the next byte.

The files, one after the other, are cut into windows; the byte behind a window is the last target:

    text       t h e   c a t   s a t           length = 4
    window 0   t h e _        targets   h e _ c
    window 1   c a t _        targets   a t _ s
"""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded, unreadable
from hpctrain.data.dataset import Split

BYTES = 256
#: Folders beside the standard library proper: not in every installation, or not of Python.
_NOT_PYTHON = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@config.options
class TextOptions:
    """`[data] kind = "text"`: `files`, names or patterns such as "texts/**/*.txt".

    Without them the sources of Python's own standard library are read. The last `test_fraction`
    of the windows are the test set.
    """

    files: list[str] = pydantic.Field(default_factory=list)
    length: Annotated[int, pydantic.Field(ge=1)] = 128
    test_fraction: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.05

    def load(self, seed: int) -> Split:
        """Return windows with `length` bytes each; the classes are the 256 bytes.

        Raises UsageError for a name without a file, or if the text is shorter than a window.
        """
        paths = tuple(_matching(self.files) if self.files else standard_library())
        sizes = [path.stat().st_size for path in paths]
        windows = max(0, sum(sizes) - 1) // self.length
        tests = int(windows * self.test_fraction)
        if windows - tests < 1:
            raise UsageError(
                f"[data] length: expected a text of {self.length + 1} bytes or more, a window and "
                f"the byte behind it, seen {sum(sizes)} bytes in {len(paths)} files; "
                "give more files or a smaller length"
            )
        ends = np.cumsum(sizes)
        train = Windows(paths, ends, self.length, 0, windows - tests)
        test = Windows(paths, ends, self.length, windows - tests, tests) if tests else None
        return Split(train, test, BYTES)


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows `first` .. `first + count - 1` of a text in files, read on request.

    `ends`: the end of each file in the text, int64 (files,).
    """

    paths: Sequence[Path]
    ends: np.ndarray
    length: int
    first: int
    count: int

    def __len__(self) -> int:
        """Return the number of windows."""
        return self.count

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return (self.length,)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return the windows at `indexes`, uint8 (n, length), and their targets, int64 alike."""
        windows = np.empty((len(indexes), self.length + 1), np.uint8)
        for row, index in zip(windows, indexes, strict=True):
            data = self._read((self.first + int(index)) * self.length, self.length + 1)
            row[:] = np.frombuffer(data, np.uint8)
        return windows[:, :-1], windows[:, 1:].astype(np.int64)

    def _read(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the text from `start`, possibly of several files."""
        data = b""
        while len(data) < size:
            at = start + len(data)
            i = int(np.searchsorted(self.ends, at, side="right"))
            try:
                with open(self.paths[i], "rb", buffering=0) as file:
                    file.seek(at - (int(self.ends[i - 1]) if i else 0))
                    block = file.read(min(size - len(data), int(self.ends[i]) - at))
            except OSError as error:
                raise unreadable(self.paths[i], error) from None
            if not block:
                raise UsageError(f"{self.paths[i]} has become shorter since the start of the run")
            data += block
        return data


def standard_library() -> list[Path]:
    """Return the sources of Python's own standard library, without its tests, in order of name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if path.is_file())
    return sorted(p for p in files if not _NOT_PYTHON & set(p.relative_to(root).parts[:-1]))


def _matching(patterns: Sequence[str]) -> list[Path]:
    """Return the files that `patterns` name, each once: in their order, then in order of name."""
    matches: dict[Path, None] = {}
    for pattern in patterns:
        names = sorted(glob.glob(str(expanded(pattern)), recursive=True))
        files = [path for path in map(Path, names) if path.is_file()]
        if not files:
            raise UsageError(f"[data] files: expected a file, seen none that is named {pattern!r}")
        matches |= dict.fromkeys(files)
    return list(matches)
