"""The options of files of each format: paths, keys, and the division into sets.

path = "train-*.h5"          files of a set, joined in the order of their names
test_path = "test.h5"        a test set in other files, under the same keys
x_test, y_test               a test set in the same files, under other keys
test_split = "test"          a test set of a name (Hugging Face)
test_share = 0.2             a test set drawn from the samples, by the seed of the run
"""

from __future__ import annotations

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Split, make_split
from hpctrain.data.formats.arrays import FileArray, Part
from hpctrain.data.formats.kinds import find_other_kind
from hpctrain.data.formats.samples import FileSamples, read_samples

Share = Annotated[float, pydantic.Field(gt=0, lt=1)]
Classes = Annotated[int, pydantic.Field(ge=1)]
_PATTERN = frozenset("*?[")


def find_paths(name: str) -> list[Path]:
    """Return the files, or folders, of a name or a pattern, sorted by name.

    Raises UsageError if nothing matches a pattern.
    """
    path = expanded(name)
    if not _PATTERN & set(name) or path.exists():
        return [path]
    paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not paths:
        raise UsageError(f"[data] path: expected a file, seen none that matches {name!r}")
    return paths


@config.options
class FileOptions(ArrayOptions):
    """Keys of `[data]` for files of every format."""

    PATHS: ClassVar[tuple[str, ...]] = ("path", "test_path")
    path: str
    test_share: Share | None = None
    classes: Classes | None = None

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        """Return the parts of x and y in one file."""
        raise NotImplementedError

    def _open(self, name: str, keys: tuple[Any, Any], finite: bool, **split: Any) -> FileSamples:
        """Return the samples under `keys` in the files that `name` matches."""
        paths = find_paths(name)
        try:
            parts = [self._probe(path, keys, **split) for path in paths]
        except UsageError:
            kind = type(self).__name__.removesuffix("Options").lower()
            if other := find_other_kind(paths[0], kind):
                raise UsageError(
                    f"{paths[0]}: expected a file of the kind '{kind}', seen '{other}': set [data] "
                    f"kind = '{other}'; see hpctrain data info"
                ) from None
            raise
        x, y = (FileArray(column) for column in zip(*parts, strict=True))
        classes = self.classes or y.parts[0].classes
        return read_samples(x, y, classes, f"{name}: {_text(keys[0])}, {_text(keys[1])}", finite)

    def _split(
        self,
        train: FileSamples,
        tests: dict[str, Callable[[], FileSamples] | None],
        seed: int,
    ) -> Split:
        """Return the sets; the test set is absent, or asked for by a single key.

        `tests`: by the keys that ask for it, the function that opens it, or None.
        """
        requested = [key for key, opened in tests.items() if opened]
        requested += ["test_share"] * (self.test_share is not None)
        if len(requested) > 1:
            raise UsageError(
                f"[data] expected one way to a test set, seen {' and '.join(requested)}; leave out "
                "all but one"
            )
        test = next((opened() for opened in tests.values() if opened), None)
        if self.test_share is not None:
            train, test = train.divide(self.test_share, seed)
        return self.finish(make_split(train, test, self.path, train.classes), seed)


@config.options
class TableOptions(FileOptions):
    """Keys of files whose samples have the same keys in training and test files."""

    test_path: str | None = None

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return sets that read their files by rows; raise UsageError for an invalid file."""
        keys = (self.x, self.y)  # type: ignore[attr-defined]
        path = self.test_path
        test = (lambda: self._open(path, keys, finite)) if path is not None else None
        return self._split(self._open(self.path, keys, finite), {"test_path": test}, seed)


@config.options
class KeyedOptions(FileOptions):
    """Keys of files with named arrays; some arrays may be a test set."""

    test_path: str | None = None
    x: str = "x"
    y: str = "y"
    x_test: str | None = None
    y_test: str | None = None

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return sets that read their files by rows; raise UsageError for an invalid file."""
        if (self.x_test is None) != (self.y_test is None):
            raise UsageError("[data] expected x_test and y_test, seen only one")
        keys, path, test_keys = (self.x, self.y), self.test_path, (self.x_test, self.y_test)
        tests = {
            "test_path": (lambda: self._open(path, keys, finite)) if path is not None else None,
            "x_test": (lambda: self._open(self.path, test_keys, finite)) if self.x_test else None,
        }
        return self._split(self._open(self.path, keys, finite), tests, seed)


@config.options
class Hdf5Options(KeyedOptions):
    """`[data] kind = "hdf5"`: arrays `x` and `y` of a file, named by their path in it."""

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import hdf5

        return hdf5.probe(path, keys)


@config.options
class ZarrOptions(KeyedOptions):
    """`[data] kind = "zarr"`: arrays `x` and `y` of a group."""

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import zarr_store

        return zarr_store.probe(path, keys)


@config.options
class SafetensorsOptions(KeyedOptions):
    """`[data] kind = "safetensors"`: tensors `x` and `y` of a file."""

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import tensors

        return tensors.probe(path, keys)


@config.options
class ParquetOptions(TableOptions):
    """`[data] kind = "parquet"`: column `x`, or columns of numbers side by side, and column `y`."""

    x: str | list[str]
    y: str

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import parquet

        return parquet.probe(path, keys)


@config.options
class WebdatasetOptions(TableOptions):
    """`[data] kind = "webdataset"`: members with the extensions `x` and `y` in tar files."""

    x: str
    y: str = "cls"

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import tar_shards

        return tar_shards.probe(path, keys)


@config.options
class HuggingFaceOptions(FileOptions):
    """`[data] kind = "huggingface"`: columns `x` and `y` of a folder that `save_to_disk` wrote.

    `split` is "train" by default, if the folder has splits.
    """

    PATHS: ClassVar[tuple[str, ...]] = ("path",)
    x: str | list[str]
    y: str
    split: str | None = None
    test_split: str | None = None

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return sets that read their files by rows; raise UsageError for an invalid folder."""
        keys, name = (self.x, self.y), self.test_split
        test = (lambda: self._open(self.path, keys, finite, split=name)) if name else None
        train = self._open(self.path, keys, finite, split=self.split)
        return self._split(train, {"test_split": test}, seed)

    def _probe(self, path: Path, keys: tuple[Any, Any], **split: Any) -> list[Part]:
        from hpctrain.data.formats import hugging_face

        return hugging_face.probe(path, keys, **split)


def _text(key: str | list[str]) -> str:
    return key if isinstance(key, str) else ", ".join(key)
