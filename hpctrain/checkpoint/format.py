"""Checkpoint format 2: the entries of a manifest, and the conditions of a whole checkpoint.

    part-00000.safetensors    pieces: ranges of flat arrays under keys "name@offset"
    part-00001.safetensors    ...
    manifest.json             size and dtype of each array; of each part the pieces, their bytes and
                              the hashes of their units; `state`, `about`, own hash

Any range of an array is found, read and verified by the manifest alone: no header of a part is
needed, and it does not matter how many parts there are, or who wrote them. A checkpoint is whole if
the manifest, the headers and all units have their hashes, and if the pieces cover every array: no
gap, no overlap. Nothing is pickled, so reading executes no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic

from hpctrain.checkpoint import hashes
from hpctrain.core import config

NAME = re.compile(r"(bad-)?step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")
Dtype = Literal["float64", "float32", "float16", "int64", "int32", "int16", "int8",
                "uint64", "uint32", "uint16", "uint8", "bool"]  # fmt: skip
Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")]
SlotEdges = Mapping[str, Sequence[int]]  #: {array: bounds of its slots, ascending}


class DamagedError(Exception):
    """The files on the disk differ from those saved."""


class Piece(NamedTuple):
    """Elements `offset` .. `offset + len(array)` of the flat array `name` of `size` elements."""

    name: str
    offset: int
    size: int
    array: np.ndarray


@config.options
class FlatArray:
    """A whole flat array, however many pieces it was cut into."""

    size: pydantic.NonNegativeInt
    dtype: Dtype


@config.options
class SavedPiece:
    """The place of `length` elements of an array in a part, and the hash of each unit."""

    array: str
    offset: pydantic.NonNegativeInt  #: the first of its elements in the array
    length: pydantic.PositiveInt
    begin: pydantic.NonNegativeInt  #: its first byte in the file
    sha256: list[Sha256]


@config.options
class PartFile:
    """A file that holds pieces, one behind the other, after a header."""

    file: FileName
    size_bytes: pydantic.NonNegativeInt
    header_bytes: pydantic.NonNegativeInt
    header_sha256: Sha256
    pieces: list[SavedPiece]


@config.options
class Manifest:
    """The contents of `manifest.json`, besides its own hash."""

    step: Annotated[int, pydantic.Field(ge=0, lt=2**63)]
    arrays: dict[str, FlatArray]
    parts: list[PartFile]
    state: dict[str, int | str]
    about: dict[str, Any]
    format: Literal[2] = 2

    @property
    def edges(self) -> SlotEdges:
        """The bounds of the slots in each array that has slots."""
        return {
            name: hashes.distinct_bounds(spans) for name, spans in slot_spans(self.about).items()
        }


class Contribution(NamedTuple):
    """A rank's contribution to a manifest, as ranks exchange it."""

    part: dict[str, Any]  #: of a PartFile
    arrays: list[tuple[str, int, Dtype]]  #: name, size and dtype of the array of each piece
    state: dict[str, int | str]


def step_name(step: int) -> str:
    """Return the name of the directory that holds `step`."""
    return f"step-{step:08d}"


def slot_spans(about: Mapping[str, Any]) -> dict[str, list[hashes.Span]]:
    """Return the spans of the tensors in each plane, of `weights` in the facts of a checkpoint."""
    return {
        plane: [(p["offset"], p["offset"] + prod(p["shape"])) for p in places.values()]
        for plane, places in (about.get("weights") or {}).items()
    }


def params_sha256(manifest: Manifest) -> str | None:
    """Return the hash of the parameters, by the manifest alone.

    None if the checkpoint does not name its tensors, or if a piece cuts a unit, as no engine does.
    """
    slots, slot_edges = slot_spans(manifest.about).get("param"), manifest.edges.get("param", ())
    units = {
        span: sha256
        for part in manifest.parts
        for piece in part.pieces
        if piece.array == "param"
        for span, sha256 in zip(
            pairwise(_unit_bounds(piece, slot_edges)), piece.sha256, strict=True
        )
    }
    try:
        slot = partial(hashes.slot_sha256, unit_sha256=lambda *span: units[span])
        return None if slots is None else hashes.combine_hashes(map(slot, sorted(slots)))
    except KeyError:
        return None


def merge_arrays(contributions: Iterable[Contribution]) -> dict[str, FlatArray]:
    """Return the arrays that the pieces of some ranks belong to; raise DamagedError if unequal."""
    arrays: dict[str, FlatArray] = {}
    for name, size, dtype in (
        entry for contribution in contributions for entry in contribution.arrays
    ):
        add(arrays, name, FlatArray(size=size, dtype=dtype), "pieces")
    return arrays


def add(table: dict[str, Any], name: str, entry: Any, kind: str) -> None:
    """Add an entry to `table`; raise DamagedError if the name has another entry."""
    if table.setdefault(name, entry) != entry:
        raise DamagedError(f"{kind} of '{name}' are of {table[name]} and of {entry}")


def part_from_table(table: Mapping[str, Any]) -> PartFile:
    """Return the PartFile of a JSON `table`."""
    return PartFile(**{**table, "pieces": [SavedPiece(**piece) for piece in table["pieces"]]})


def check_pieces(manifest: Manifest) -> None:
    """Raise DamagedError unless the pieces fill their parts and make up the arrays."""
    slot_edges, spans = manifest.edges, []
    for part in manifest.parts:
        end_byte = part.header_bytes
        for piece in part.pieces:
            flat = manifest.arrays.get(piece.array)
            piece_text = f"{part.file}: piece '{piece.array}@{piece.offset}'"
            if flat is None or piece.offset + piece.length > flat.size:
                raise DamagedError(f"{piece_text} does not fit {flat}")
            if piece.begin != end_byte:
                raise DamagedError(
                    f"{piece_text} begins at byte {piece.begin}; expected {end_byte}"
                )
            bounds = _unit_bounds(piece, slot_edges.get(piece.array, ()))
            if len(piece.sha256) != len(bounds) - 1:
                raise DamagedError(
                    f"{piece_text} has {len(piece.sha256)} hashes; expected {len(bounds) - 1}"
                )
            end_byte += piece.length * np.dtype(flat.dtype).itemsize
            spans.append((piece.array, piece.offset, piece.length))
        if end_byte != part.size_bytes:
            raise DamagedError(f"{part.file} has {part.size_bytes} bytes; expected {end_byte}")
    file_names = [part.file for part in manifest.parts]
    if len(set(file_names)) != len(file_names):
        raise DamagedError("two parts have one name")
    _check_coverage(manifest.arrays, spans)


def _check_coverage(arrays: Mapping[str, FlatArray], spans: Iterable[tuple[str, int, int]]) -> None:
    covered = dict.fromkeys(arrays, 0)
    for name, offset, length in sorted(spans):
        if offset != covered[name]:
            kind = "overlap" if offset < covered[name] else "leave a gap"
            raise DamagedError(f"pieces of '{name}' {kind} at element {min(offset, covered[name])}")
        covered[name] += length
    for name, flat in arrays.items():
        if covered[name] != flat.size:
            raise DamagedError(f"pieces of '{name}' have {covered[name]} of {flat.size} elements")


def _unit_bounds(piece: SavedPiece, slot_edges: Sequence[int]) -> list[int]:
    return hashes.unit_bounds(piece.offset, piece.offset + piece.length, slot_edges)
