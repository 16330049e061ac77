"""Text as bytes, for models that predict the next byte.

The concatenated files are divided into windows; the last target is the byte behind the window:

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
from typing import Annotated, ClassVar

import numpy as np
import pydantic

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded, unreadable
from hpctrain.data.dataset import Split
from hpctrain.data.reading import ReadOptions, with_reading

BYTE_VALUES = 256
#: Folders that are not part of the standard library, or not in every installation.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@config.options
class TextOptions(ReadOptions):
    """`[data] kind = "text"`: `files`, names or patterns such as "texts/**/*.txt".

    The default is the sources of Python's standard library. The last `test_fraction` of the windows
    are the test set.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("files",)
    files: list[str] = pydantic.Field(default_factory=list)
    length: Annotated[int, pydantic.Field(ge=1)] = 128
    test_fraction: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.05

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return windows with `length` bytes each; the classes are the 256 values of a byte.

        Raises UsageError if a pattern matches no file, or the text is shorter than a window.
        """
        paths = tuple(_find_files(self.files) if self.files else standard_library_files())
        sizes = [path.stat().st_size for path in paths]
        window_count = max(0, sum(sizes) - 1) // self.length
        test_count = int(window_count * self.test_fraction)
        train_count = window_count - test_count
        if train_count < 1:
            raise UsageError(
                f"[data] length: expected a text of {self.length + 1} bytes or more, a window and "
                f"the byte behind it, seen {sum(sizes)} bytes in {len(paths)} files; "
                "give more files or a smaller length"
            )
        file_ends = np.cumsum(sizes)
        train = TextWindows(paths, file_ends, self.length, 0, train_count)
        test = TextWindows(paths, file_ends, self.length, train_count, test_count)
        return with_reading(Split(train, test if test_count else None, BYTE_VALUES), self)


@dataclass(frozen=True, eq=False)
class TextWindows:
    """`count` windows of a text in files, from number `first_window` on, read on request.

    `file_ends` holds the position in the text at which each file ends, int64 (files,).
    """

    paths: Sequence[Path]
    file_ends: np.ndarray
    length: int
    first_window: int
    count: int

    def __len__(self) -> int:
        """Return the number of windows."""
        return self.count

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """A sample's shape."""
        return (self.length,)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (windows, targets) at `indexes`, uint8 and int64, both (n, length)."""
        windows = np.empty((len(indexes), self.length + 1), np.uint8)
        for row, index in zip(windows, indexes, strict=True):
            data = self._read_text((self.first_window + int(index)) * self.length, self.length + 1)
            row[:] = np.frombuffer(data, np.uint8)
        return windows[:, :-1], windows[:, 1:].astype(np.int64)

    def _read_text(self, start: int, size: int) -> bytes:
        """Return `size` bytes of the text from position `start`, possibly from several files."""
        data = b""
        while len(data) < size:
            position = start + len(data)
            i = int(np.searchsorted(self.file_ends, position, side="right"))
            try:
                with open(self.paths[i], "rb", buffering=0) as file:
                    file.seek(position - (int(self.file_ends[i - 1]) if i else 0))
                    chunk = file.read(min(size - len(data), int(self.file_ends[i]) - position))
            except OSError as error:
                raise unreadable(self.paths[i], error) from None
            if not chunk:
                raise UsageError(f"{self.paths[i]} became shorter after the start of the run")
            data += chunk
        return data


def standard_library_files() -> list[Path]:
    """Return the sources of Python's standard library, without its tests, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if path.is_file())
    folders = {path: set(path.relative_to(root).parts[:-1]) for path in files}
    return sorted(path for path in folders if not _SKIPPED_FOLDERS & folders[path])


def _find_files(patterns: Sequence[str]) -> list[Path]:
    """Return the files that match `patterns`, each once: by pattern, then sorted by name."""
    matches: dict[Path, None] = {}
    for pattern in patterns:
        paths = sorted(glob.glob(str(expanded(pattern)), recursive=True))
        files = [path for path in map(Path, paths) if path.is_file()]
        if not files:
            raise UsageError(f"[data] files: expected a file, seen none that matches {pattern!r}")
        matches |= dict.fromkeys(files)
    return list(matches)
