"""Checkpoint format 1: the contents of the files, and the conditions of a whole checkpoint.

    part-00000.safetensors    the pieces of rank 0: flat arrays under keys "name@offset"
    part-00001.safetensors    ...
    manifest.json             hash and size of each part, size of each array, `about`, own hash

A checkpoint is whole if the manifest and each part have their hashes, and if the pieces cover
every array: no gap, no overlap. Nothing is pickled, so reading executes no code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import pydantic
import safetensors
import safetensors.numpy

from hpctrain import config
from hpctrain.checkpoint.about import fault_of
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.xp import to_host
from hpctrain.run_files.schemas import first_fault

MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 * files.MIB  #: at most; a thousand ranks and ten thousand tensors need 1 MiB
NAME = re.compile(r"(bad-)?step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
# Errors that reading JSON of an unexpected shape may raise.
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
Dtype = Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8",
                "uint64", "uint32", "uint16", "uint8", "bool"]  # fmt: skip


class Piece(NamedTuple):
    """Elements `offset` .. `offset + len(array)` of the flat array `name` of `size` elements."""

    name: str
    offset: int
    size: int
    array: np.ndarray


@config.options
class PartFile:
    """The hash and the size of one rank's file."""

    sha256: str
    size_bytes: pydantic.NonNegativeInt


@config.options
class Flat:
    """A whole flat array, however many pieces it was cut into."""

    size: pydantic.NonNegativeInt
    dtype: Dtype


@config.options
class Manifest:
    """The contents of `manifest.json`, besides its own hash."""

    step: Annotated[int, pydantic.Field(ge=0, lt=2**63)]
    parts: list[PartFile]
    arrays: dict[str, Flat]
    about: dict[str, Any]
    format: Literal[1] = 1


_MANIFEST = pydantic.TypeAdapter(Manifest)


class DamagedError(Exception):
    """The files on the disk differ from those saved."""


class ArraySpan(NamedTuple):
    """The place of a piece, without its content, as ranks exchange it."""

    name: str
    offset: int
    length: int
    size: int
    dtype: str


def step_name(step: int) -> str:
    """Return the name of the directory that holds `step`."""
    return f"step-{step:08d}"


def part_name(rank: int) -> str:
    """Return the name of the file that holds the pieces of `rank`."""
    return f"part-{rank:05d}.safetensors"


def write_part(file: Path, pieces: Sequence[Piece]) -> tuple[dict[str, Any], list[ArraySpan]]:
    """Write `pieces` to a new `file` and through to the disk; return its PartFile, as a table."""
    # An array of no elements needs none: its name and dtype are in the manifest.
    full = [piece for piece in pieces if len(piece.array)]
    arrays = {f"{p.name}@{p.offset}": np.ascontiguousarray(to_host(p.array)) for p in full}
    data = safetensors.numpy.save(arrays)
    write(file, data)
    part = PartFile(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    return asdict(part), [_span(piece) for piece in pieces]


def check_part(file: Path, part: PartFile) -> None:
    """Raise DamagedError unless `file` has the size and the hash of `part`."""
    _check_size(file, part)
    if _sha256(file) != part.sha256:
        raise DamagedError(f"{file} was altered: its SHA-256 is not that of the manifest")


def _check_size(file: Path, part: PartFile) -> None:
    try:
        with files.open_regular(file) as stream:
            actual = os.fstat(stream.fileno()).st_size
    except files.MissingError:
        raise DamagedError(f"{file} is missing") from None
    if actual != part.size_bytes:
        raise DamagedError(f"{file} has {actual} bytes; expected {part.size_bytes}")


def manifest_of(
    step: int, parts: Sequence[PartFile], spans: Sequence[ArraySpan], about: dict[str, Any]
) -> Manifest:
    """Return the manifest of these parts; raise DamagedError if the spans do not make up arrays."""
    arrays: dict[str, Flat] = {}
    for span in spans:
        flat = Flat(size=span.size, dtype=cast(Dtype, span.dtype))
        if arrays.setdefault(span.name, flat) != flat:
            raise DamagedError(f"pieces of '{span.name}' are of {arrays[span.name]} and of {flat}")
    _check_cover(arrays, [span[:3] for span in spans])
    return Manifest(step=step, parts=list(parts), arrays=arrays, about=about)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest` and the directory's entries through to the disk."""
    table = json.loads(json.dumps(asdict(manifest)))  # as it will be when read
    table["sha256"] = _seal(table)
    data = json.dumps(table, indent=1).encode()
    if len(data) > MANIFEST_BYTES:  # a reader would refuse it
        raise DamagedError(f"its manifest has {len(data)} bytes; expected at most {MANIFEST_BYTES}")
    write(directory / MANIFEST, data)
    sync(directory)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`.

    Raises DamagedError if it is missing or altered, UsageError if a newer hpctrain wrote it.
    """
    file = path / MANIFEST
    table = _table(file)
    try:
        if table.pop("sha256") != _seal(table):
            raise DamagedError(f"{file} was altered: its own SHA-256 is another")
        newer = table["format"] > 1
        manifest = None if newer else _MANIFEST.validate_json(json.dumps(table))
    except pydantic.ValidationError as error:
        raise DamagedError(f"{file} cannot be understood: {first_fault(error)}") from None
    except _NONSENSE as error:
        fault_text = f"{type(error).__name__}: {brief(str(error))[1:-1]}"
        raise DamagedError(f"{file} cannot be understood: {fault_text}") from None
    if manifest is None:
        raise UsageError(f"{path} has format {brief(table['format'])}; install a newer hpctrain")
    named = NAME.fullmatch(path.name)
    if named and int(named[2]) != manifest.step:
        raise DamagedError(f"{file} is that of step {manifest.step}")
    sizes = {name: flat.size for name, flat in manifest.arrays.items()}
    if fault := fault_of(manifest.about, manifest.step, len(manifest.parts), sizes):
        raise DamagedError(f"{file}: {fault}")
    return manifest


def _table(file: Path) -> dict[str, Any]:
    try:
        data = files.read_bytes(file, MANIFEST_BYTES)
    except files.MissingError:
        if os.path.lexists(file.parent) and not file.parent.exists():
            raise files.FileError(f"{file.parent}: a link to what is not there") from None
        raise DamagedError(f"{file} is missing") from None
    try:
        return files.as_object(
            files.parsed_json(files.decoded(data, str(file)), str(file)), str(file)
        )
    except files.FileError as error:
        raise DamagedError(f"{file} cannot be understood: {error}") from None


def read(path: Path, with_arrays: bool) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Return the manifest and, if `with_arrays`, all arrays; raise DamagedError if damaged."""
    manifest, spans = read_manifest(path), []
    _check_sizes(path, manifest)  # before memory is allocated for arrays
    arrays = {
        n: np.empty(f.size if with_arrays else 0, f.dtype) for n, f in manifest.arrays.items()
    }
    for rank, part in enumerate(manifest.parts):
        file = path / part_name(rank)
        check_part(file, part)
        for name, offset, array in _pieces(file):
            flat, end = manifest.arrays.get(name), offset + len(array)
            if flat is None or array.dtype != flat.dtype or not 0 <= offset <= end <= flat.size:
                raise DamagedError(f"{file}: piece '{name}@{offset}' does not fit {flat}")
            spans.append((name, offset, len(array)))
            if with_arrays:
                arrays[name][offset:end] = array
    _check_cover(manifest.arrays, spans)
    return manifest, arrays


def _check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise DamagedError unless the parts have their sizes, and could hold the arrays."""
    for rank, part in enumerate(manifest.parts):
        _check_size(path / part_name(rank), part)
    parts_bytes = sum(part.size_bytes for part in manifest.parts)
    for name, flat in manifest.arrays.items():
        if flat.size * np.dtype(flat.dtype).itemsize > parts_bytes + files.MIB:
            claim = f"{flat.size} numbers of {brief(name)} in {parts_bytes} bytes of parts"
            raise DamagedError(f"{path / MANIFEST}: seen {claim}")


def write(file: Path, data: bytes) -> None:
    """Write a new file through to the disk; an OSError names it."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:  # those of write and fsync do not know the file's name
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


def _span(piece: Piece) -> ArraySpan:
    if piece.array.ndim != 1:
        raise ValueError(f"piece '{piece.name}' has shape {piece.array.shape}; expected it flat")
    return ArraySpan(piece.name, piece.offset, len(piece.array), piece.size, piece.array.dtype.name)


def _check_cover(arrays: Mapping[str, Flat], spans: Iterable[tuple[str, int, int]]) -> None:
    reached = dict.fromkeys(arrays, 0)
    for name, offset, length in sorted(spans):
        if length and offset != reached[name]:
            kind = "overlap" if offset < reached[name] else "leave a gap"
            raise DamagedError(f"pieces of '{name}' {kind} at element {min(offset, reached[name])}")
        reached[name] += length
    for name, flat in arrays.items():
        if reached[name] != flat.size:
            raise DamagedError(f"pieces of '{name}' have {reached[name]} of {flat.size} elements")


def _pieces(file: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    try:
        with safetensors.safe_open(str(file), framework="numpy") as part:
            for key in part.keys():  # noqa: SIM118  # it is no mapping
                name, _, offset = key.rpartition("@")
                array = part.get_tensor(key)
                if array.ndim != 1:
                    raise ValueError(f"'{key}' has shape {array.shape}")
                yield name, int(offset), array
    except (safetensors.SafetensorError, *_NONSENSE) as error:
        raise DamagedError(f"{file} cannot be understood: {error}") from None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with files.open_regular(file) as stream:
        while block := stream.read(files.MIB):
            digest.update(block)
    return digest.hexdigest()


def _seal(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
