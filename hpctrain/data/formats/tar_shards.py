"""WebDataset: tar files whose members with the same name, but for the extension, are a sample.

    train/0001.jpg   train/0001.cls   train/0002.jpg   train/0002.cls

One pass over the headers of a file finds the place of each member; then a rank reads the members of
its own samples. Images are decoded by Pillow, `.npy` are arrays, `.cls .id .index .json` numbers.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpctrain.core.errors import DataError, UsageError
from hpctrain.core.files import brief, open_regular
from hpctrain.core.names import counted, unknown
from hpctrain.core.opening import NAMED
from hpctrain.data.formats.arrays import Part, ReadRows, guarded, must_be_numbers
from hpctrain.data.formats.images import decode_image, stack_values
from hpctrain.data.formats.libraries import faults_of, load_library
from hpctrain.data.npy import read_header
from hpctrain.data.stored import unpack_array

IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "webp", "bmp", "tif", "tiff", "gif")
NUMBERS = ("cls", "cls2", "id", "index", "inx", "json")
_EXPECTED = "a tar file of samples"
_REMEDY = "write it with webdataset.TarWriter, or copy it again"
_DIGITS = 64  #: bytes of a number; a longer member is none


def probe(path: Path, keys: tuple[str, ...]) -> list[Part]:
    """Return the arrays of the members with the extensions `keys`, in the order of the samples."""
    index = _read_index(path)
    return [_probe_members(path, index, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the extensions of the first sample's members."""
    return list(next(iter(_read_index(path).values())))


Index = dict[str, dict[str, tuple[int, int]]]  #: sample -> extension -> (first byte, bytes)


def _read_index(path: Path) -> Index:
    split_name = load_library("webdataset.tariterators", "webdataset").base_plus_ext
    index: Index = {}
    with open_regular(path, NAMED) as file, faults_of(str(path), _EXPECTED, _REMEDY):
        size = file.seek(0, 2)
        file.seek(0)
        with tarfile.TarFile(fileobj=file) as archive:
            for member in archive:
                _add_member(index, member, split_name, path, size)
                archive.members = []  # type: ignore[attr-defined]  # it would keep each header
        _must_end(file, archive.offset, path)
    if not index:
        raise UsageError(f"{path}: expected samples, seen none; {_REMEDY}")
    return index


def _add_member(index: Index, member: Any, split_name: Any, path: Path, size: int) -> None:
    if member.isdir() or member.name.startswith("__"):  # of WebDataset itself
        return
    if not member.isreg() or member.issparse():
        raise UsageError(
            f"{path}: expected regular files, seen {brief(member.name)}, another; {_REMEDY}"
        )
    key, extension = split_name(member.name)
    if key is None:
        return  # a name without an extension belongs to no sample
    if member.offset_data + member.size > size:
        raise UsageError(
            f"{path}: expected all {member.size} bytes of {brief(member.name)}; copy it again"
        )
    sample = index.setdefault(key, {})
    if sample.setdefault(extension.lower(), place := (member.offset_data, member.size)) != place:
        raise UsageError(f"{path}: sample {brief(key)}: expected one .{extension}, seen several")


def _must_end(file: BinaryIO, offset: int, path: Path) -> None:
    """Raise UsageError unless the block at `offset` is the end; tarfile stops at a torn one too."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise UsageError(
            f"{path}: expected a block of zeros behind the last member, at byte {offset}, seen "
            "none: the file is cut or damaged; copy it again"
        )


def _probe_members(path: Path, index: Index, key: str) -> Part:
    key = key.lstrip(".").lower()
    for name, members in index.items():
        if key not in members:
            raise UsageError(f"{path}: sample {brief(name)}: " + unknown("extension", key, members))
    places = np.array([members[key] for members in index.values()], np.int64)
    place = f"{path}: .{key}"
    with open_regular(path, NAMED) as file, faults_of(place, _EXPECTED, _REMEDY):
        first = _decoder(key, place)(_read_member(file, places[0]), f"{place} of row 0")
    must_be_numbers(first.dtype, (len(places), *first.shape), place)
    n, shape, dtype = len(places), first.shape, first.dtype
    open_rows = partial(_open_rows, path, key, places, shape, dtype)
    note = counted(n, "member")
    return Part(place, (n, *shape), dtype, n, open_rows, note, decodes_rows=True)


def _read_member(file: BinaryIO, place: np.ndarray) -> bytes:
    file.seek(int(place[0]))
    return file.read(int(place[1]))


def _decoder(key: str, place: str) -> Callable[[bytes, str], np.ndarray]:
    kind = key.rpartition(".")[2]
    if kind in IMAGES:
        return partial(decode_image, extra="webdataset")
    if kind in NUMBERS:
        return _decode_number
    if kind == "npy":
        return _decode_npy
    raise UsageError(
        f"{place}: expected an image ({', '.join(IMAGES)}), npy, or a number "
        f"({', '.join(NUMBERS)}), seen .{kind}; write numbers for texts, as .cls"
    )


def _decode_number(data: bytes, place: str) -> np.ndarray:
    text = data[: _DIGITS + 1].decode("ascii", "replace").strip()
    try:
        if len(data) > _DIGITS:
            raise ValueError
        return np.array(int(text) if text.lstrip("-").isdecimal() else float(text))
    except ValueError:
        raise DataError(
            f"{place}: expected a number of at most {_DIGITS} bytes, seen {brief(text)}; write "
            "3, say"
        ) from None


def _decode_npy(data: bytes, place: str) -> np.ndarray:
    stream, prefix = io.BytesIO(data), f"{place}: expected an array"
    shape, is_fortran, dtype = read_header(stream, prefix, "write it with numpy.save")
    array = unpack_array(stream, place, dtype, shape[::-1] if is_fortran else shape)
    return array.transpose() if is_fortran else array


def _open_rows(
    path: Path, key: str, places: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
) -> ReadRows:
    file, place = open_regular(path, NAMED), f"{path}: .{key}"
    decode = _decoder(key, place)

    def read(rows: np.ndarray) -> np.ndarray:
        names = [f"{place} of row {row}" for row in rows]
        values = [
            decode(_read_member(file, places[row]), name)
            for row, name in zip(rows, names, strict=True)
        ]
        return stack_values(values, shape, dtype, names)

    return guarded(read, place, _EXPECTED)
