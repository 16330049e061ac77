"""IDX files, the format of MNIST, Fashion-MNIST and EMNIST, gzipped or not.

    00 00 | type | dims | size of each dim, 4 bytes each, big-endian | the numbers, big-endian

Images that are not gzipped are not loaded: each rank reads the rows of its own batches.
Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", 1998.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.files import expanded, open_regular
from hpctrain.core.opening import NAMED
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Split, make_split
from hpctrain.data.stored import StoredSamples, Stream, map_array, unpack_array

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP = b"\x1f\x8b"


@config.options
class IdxOptions(ArrayOptions):
    """`[data] kind = "idx"`: the files of images and of their labels; a test set is optional."""

    PATHS: ClassVar[tuple[str, ...]] = ("images", "labels", "test_images", "test_labels")
    images: str
    labels: str
    test_images: str | None = None
    test_labels: str | None = None

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return the sets, scaled by `scale`.

        Raises UsageError that names the file, and its expected and actual contents.
        """
        if (self.test_images is None) != (self.test_labels is None):
            raise UsageError("[data] expected test_images and test_labels, seen only one")
        labels = _read_labels(self.labels)
        classes = int(labels.max()) + 1
        train, test = _open_samples(self.images, self.labels, labels, classes, finite), None
        if self.test_images is not None and self.test_labels is not None:
            y = _read_labels(self.test_labels)
            test = _open_samples(self.test_images, self.test_labels, y, classes, finite)
        return self.finish(make_split(train, test, self.images, classes), seed)


def _open_samples(
    images: str, labels: str, y: np.ndarray, classes: int, finite: bool
) -> StoredSamples:
    return StoredSamples(read_array(images), y, classes, f"{images}, {labels}", finite)


def _read_labels(name: str) -> np.ndarray:
    """Return all labels of a file, in memory, since they usually take a byte each."""
    y = read_array(name)
    if y.ndim != 1 or y.dtype.kind not in "iu" or not len(y):
        raise UsageError(
            f"{name}: expected labels, integers of shape (samples,), seen {y.dtype} {y.shape}"
        )
    if y.min() < 0:
        i = int(np.argmax(y < 0))
        raise UsageError(f"{name}: label {y[i]} of sample {i}; expected labels from 0")
    return y.astype(np.int64)


def read_array(name: str) -> np.ndarray:
    """Return the array of an IDX file, in the file's dtype; map a file that is not gzipped.

    Raises UsageError that names the actual contents.
    """
    path = expanded(name)
    with open_regular(path, NAMED) as file:
        is_gzipped = file.read(2) == _GZIP
        file.seek(0)
        if not is_gzipped:
            dtype, shape = _read_header(path, file)
            return map_array(file, path, dtype, shape, file.tell())
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                return unpack_array(stream, path, *_read_header(path, stream))
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(
                f"{path}: expected a whole gzip file: {error}; copy it again"
            ) from None


def _read_header(path: Path, file: Stream) -> tuple[np.dtype, tuple[int, ...]]:
    """Read the header; return the dtype and the shape of the array behind it."""
    start = file.read(4)
    if start[:2] != b"\0\0" or len(start) < 4 or start[2] not in _DTYPES:
        raise UsageError(
            f"{path}: expected an IDX file, which begins with two zero bytes, a type and the "
            f"number of dims; seen {_describe_start(start + file.read(56))}"
        )
    encoded_sizes = file.read(4 * start[3])
    if len(encoded_sizes) < 4 * start[3]:
        raise UsageError(
            f"{path}: expected the sizes of {start[3]} dims, seen {4 + len(encoded_sizes)} bytes"
        )
    return np.dtype(_DTYPES[start[2]]), struct.unpack(f">{start[3]}I", encoded_sizes)


def _describe_start(start: bytes) -> str:
    """Return the first bytes of a file for a message: as text if they are ASCII, else in hex."""
    try:
        text = start[:60].decode("ascii")
    except UnicodeDecodeError:
        return f"bytes {start[:4].hex(' ')}"
    return f"text: {text.splitlines()[0]!r}" if text.strip() else f"{len(start)} blank bytes"
