"""The part files of a checkpoint: written in one pass, read back by ranges that are verified.

A part is a safetensors file, which other libraries open: the length of the header, the header as
JSON, then the pieces, wide numbers first, so that each is aligned.

    | 8 bytes | {"param@0": {"dtype": "F32", "shape": [n], "data_offsets": [0, 4n]}, ...} | pieces |

The header follows from the lengths of the pieces. So it is written first, and each extent is hashed
on its way to the file: no copy of the state is made, only one extent of what lies on a device.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from hpctrain.checkpoint.format import (
    Contribution,
    DamagedError,
    Dtype,
    FlatArray,
    Manifest,
    PartFile,
    Piece,
    SavedPiece,
    SlotEdges,
)
from hpctrain.checkpoint.hashes import unit_bounds
from hpctrain.core import files
from hpctrain.core.opening import open_file
from hpctrain.core.xp import to_host

LEVELS = 3  #: of a file of a checkpoint: RUN/checkpoints/step-N/FILE
#: Bytes that are read, sent or written at once, unless a single unit has more.
MAX_EXTENT_BYTES = 4 * files.MIB
_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bool": "BOOL",
          **{f"{u}int{n}": f"{u or 'i'}{n}".upper() for u in ("", "u") for n in (8, 16, 32, 64)}
          }  # fmt: skip


class Extent(NamedTuple):
    """Consecutive units of a piece, at most EXTENT_BYTES."""

    file: str
    begin: int  #: the first byte in the file
    array: str
    dtype: str
    bounds: list[int]  #: of the units, in elements of the array
    sha256: list[str]  #: of the units

    @property
    def start(self) -> int:
        return self.bounds[0]

    @property
    def stop(self) -> int:
        return self.bounds[-1]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * np.dtype(self.dtype).itemsize


def write_part(
    file: Path, pieces: Sequence[Piece], edges: SlotEdges, state: Mapping[str, int | str]
) -> Contribution:
    """Write `pieces` to a new `file` and through to the disk; return the file's manifest entry.

    `edges`: the bounds of slots, at which arrays are cut into hashed units.
    """
    arrays = [(p.name, p.size, _dtype_of(p)) for p in pieces]
    # An array of no elements needs no piece: its name and dtype are in the manifest.
    nonempty_pieces = sorted((p for p in pieces if len(p.array)), key=lambda p: -p.array.itemsize)
    header = _make_header(nonempty_pieces)
    saved_pieces, end_byte = [], len(header)
    with create_file(file) as write:
        write(header)
        for piece in nonempty_pieces:
            sha256 = _write_piece(write, piece, edges.get(piece.name, ()))
            saved_pieces.append(
                SavedPiece(
                    array=piece.name,
                    offset=piece.offset,
                    length=len(piece.array),
                    begin=end_byte,
                    sha256=sha256,
                )
            )
            end_byte += piece.array.nbytes
    part = PartFile(
        file=file.name,
        size_bytes=end_byte,
        header_bytes=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        pieces=saved_pieces,
    )
    return Contribution(asdict(part), arrays, dict(state))


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise DamagedError unless each part has its size; before memory is taken for arrays."""
    for part in manifest.parts:
        with _open_part(path / part.file) as handle:
            actual = os.fstat(handle).st_size
        if actual != part.size_bytes:
            raise DamagedError(f"{path / part.file} has {actual} bytes; expected {part.size_bytes}")


def check_part(
    path: Path, part: PartFile, arrays: Mapping[str, FlatArray], edges: SlotEdges
) -> None:
    """Raise DamagedError unless the header and all units of a part have their hashes."""
    check_header(path, part)
    extents = list(extents_in_part(part, arrays, edges))
    buffer = np.empty(max((b.nbytes for b in extents), default=0), np.uint8)
    for extent in extents:
        read_extent(path, extent, buffer)


def check_header(path: Path, part: PartFile) -> None:
    """Raise DamagedError unless the header of a part has its hash."""
    header = np.empty(part.header_bytes, np.uint8)
    read_range(path / part.file, 0, header)
    if hashlib.sha256(header.data).hexdigest() != part.header_sha256:
        raise DamagedError(f"{path / part.file} was altered: its header has another SHA-256")


def read_extent(path: Path, extent: Extent, buffer: np.ndarray) -> np.ndarray:
    """Return the bytes of `extent`, read into the begin of `buffer`, uint8, and verified."""
    data, itemsize = buffer[: extent.nbytes], np.dtype(extent.dtype).itemsize
    read_range(path / extent.file, extent.begin, data)
    for (start, stop), sha256 in zip(pairwise(extent.bounds), extent.sha256, strict=True):
        unit = data[(start - extent.start) * itemsize : (stop - extent.start) * itemsize]
        if hashlib.sha256(unit.data).hexdigest() != sha256:
            raise DamagedError(
                f"{path / extent.file} was altered: elements {start} to {stop - 1} of "
                f"'{extent.array}' do not have the SHA-256 of the manifest"
            )
    return data


def read_range(file: Path, begin: int, out: np.ndarray) -> None:
    """Fill `out`, uint8, with the bytes of `file` from `begin` on."""
    remaining = out.data
    with _open_part(file) as handle:
        while remaining:
            byte_count = os.preadv(handle, [remaining], begin)
            if not byte_count:
                raise DamagedError(f"{file} ends at byte {begin}; expected {len(remaining)} more")
            begin, remaining = begin + byte_count, remaining[byte_count:]


def extents_in_part(
    part: PartFile, arrays: Mapping[str, FlatArray], edges: SlotEdges
) -> Iterator[Extent]:
    """Yield the extents that cover the pieces of a part, in the order of its bytes."""
    for piece in part.pieces:
        dtype = arrays[piece.array].dtype
        itemsize, hash_index = np.dtype(dtype).itemsize, 0
        bounds = unit_bounds(piece.offset, piece.offset + piece.length, edges.get(piece.array, ()))
        for group in _group_units(bounds, itemsize):
            begin = piece.begin + (group[0] - piece.offset) * itemsize
            unit_hashes = piece.sha256[hash_index : hash_index + len(group) - 1]
            yield Extent(part.file, begin, piece.array, dtype, group, unit_hashes)
            hash_index += len(group) - 1


@contextmanager
def create_file(file: Path) -> Iterator[Callable[[Any], None]]:
    """Create `file`; yield a function that appends bytes; write all through to the disk at the end.

    An OSError names the file.
    """
    try:
        handle = open_file(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, LEVELS)
        try:
            yield lambda data: _write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # errors of write and fsync do not know the file's name
        raise OSError(error.errno, error.strerror, str(file)) from None


def sync(directory: Path) -> None:
    """Write the entries of `directory`, such as a rename in it, through to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not support it, and need not
            raise
    finally:
        os.close(handle)


def _write_piece(
    write: Callable[[Any], None], piece: Piece, slot_edges: Sequence[int]
) -> list[str]:
    """Append a piece to the file; return the hashes of its units."""
    unit_hashes = []
    bounds = unit_bounds(piece.offset, piece.offset + len(piece.array), slot_edges)
    for group in _group_units(bounds, piece.array.itemsize):
        first = group[0] - piece.offset
        x = piece.array[first : group[-1] - piece.offset]
        data, itemsize = np.ascontiguousarray(to_host(x)).view(np.uint8), x.itemsize
        for start, stop in pairwise(group):
            unit = data[(start - group[0]) * itemsize : (stop - group[0]) * itemsize]
            unit_hashes.append(hashlib.sha256(unit.data).hexdigest())
        write(data)
    return unit_hashes


def _group_units(bounds: Sequence[int], itemsize: int) -> Iterator[list[int]]:
    """Yield the `bounds` of consecutive units in groups of at most EXTENT_BYTES."""
    group = [bounds[0]]
    for stop in bounds[1:]:
        if len(group) > 1 and (stop - group[0]) * itemsize > MAX_EXTENT_BYTES:
            yield group
            group = group[-1:]
        group.append(stop)
    yield group


def _make_header(pieces: Sequence[Piece]) -> bytes:
    """Return the begin of a safetensors file that holds `pieces` one after the other."""
    table, end = {}, 0
    for p in pieces:
        begin, end = end, end + p.array.nbytes
        dtype_code = _SAFETENSORS_DTYPES[p.array.dtype.name]
        table[f"{p.name}@{p.offset}"] = {
            "dtype": dtype_code, "shape": [len(p.array)], "data_offsets": [begin, end]
        }  # fmt: skip
    table_json = json.dumps(table).encode()
    table_json += b" " * (-len(table_json) % 8)
    return len(table_json).to_bytes(8, "little") + table_json


def _dtype_of(piece: Piece) -> Dtype:
    dtype = piece.array.dtype.name
    if piece.array.ndim != 1:
        raise ValueError(f"piece '{piece.name}' has shape {piece.array.shape}; expected it flat")
    if dtype not in _SAFETENSORS_DTYPES:
        raise ValueError(
            f"piece '{piece.name}': expected {', '.join(_SAFETENSORS_DTYPES)}, seen {dtype}"
        )
    return cast(Dtype, dtype)


def _write_all(handle: int, data: Any) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining) :]


@contextmanager
def _open_part(file: Path) -> Iterator[int]:
    try:
        stream = files.open_regular(file, LEVELS)
    except files.MissingError:
        raise DamagedError(f"{file} is missing") from None
    with stream:
        yield stream.fileno()
