"""The manifest of a checkpoint: put together from all ranks, written, read and checked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic

from hpctrain.checkpoint import parts
from hpctrain.checkpoint.about import find_fault
from hpctrain.checkpoint.format import (
    NAME,
    Contribution,
    DamagedError,
    Manifest,
    add,
    check_pieces,
    merge_arrays,
    part_from_table,
)
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.run_files.schemas import first_fault

FORMAT = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = (
    64 * files.MIB
)  #: at most; a thousand ranks and ten thousand tensors need 2 MiB
# Errors that reading JSON of an unexpected shape may raise.
_SHAPE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_MANIFEST_ADAPTER = pydantic.TypeAdapter(Manifest)


def assemble(step: int, contributions: Sequence[Contribution], about: dict[str, Any]) -> Manifest:
    """Return the manifest of what all ranks have written; raise DamagedError if it is not whole."""
    arrays, state = merge_arrays(contributions), dict[str, int | str]()
    for name, value in (
        entry for contribution in contributions for entry in contribution.state.items()
    ):
        add(state, name, value, "states")
    parts = [part_from_table(contribution.part) for contribution in contributions]
    manifest = Manifest(step=step, arrays=arrays, parts=parts, state=state, about=about)
    check_pieces(manifest)
    return manifest


def to_bytes(manifest: Manifest) -> bytes:
    """Return the file of `manifest`, with its own hash; raise DamagedError if it is too long."""
    table = json.loads(json.dumps(asdict(manifest)))  # as it will be when read
    table["sha256"] = _hash_table(table)
    data = json.dumps(table, indent=1).encode()
    if len(data) > MAX_MANIFEST_BYTES:  # a reader would refuse it
        raise DamagedError(
            f"its manifest has {len(data)} bytes; expected at most {MAX_MANIFEST_BYTES}"
        )
    return data


def read(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`.

    Raises DamagedError if it is missing or altered, or if its entries do not fit each other and the
    folder's name, UsageError if it has another format.
    """
    file = path / MANIFEST
    table = _read_table(file)
    try:
        if table.pop("sha256") != _hash_table(table):
            raise DamagedError(f"{file} was altered: its own SHA-256 is another")
        format_number = table["format"]
        is_newer = format_number > FORMAT
        manifest = parse(json.dumps(table)) if format_number == FORMAT else None
    except pydantic.ValidationError as error:
        raise DamagedError(f"{file} cannot be understood: {first_fault(error)}") from None
    except _SHAPE_ERRORS as error:
        fault_text = f"{type(error).__name__}: {brief(str(error))[1:-1]}"
        raise DamagedError(f"{file} cannot be understood: {fault_text}") from None
    if manifest is None:
        older_remedy = "use it with the hpctrain that wrote it, or start anew in another --out"
        remedy = "install a newer hpctrain" if is_newer else older_remedy
        raise UsageError(f"{path} has format {brief(format_number)}, expected {FORMAT}; {remedy}")
    name_match = NAME.fullmatch(path.name)
    if name_match and int(name_match[2]) != manifest.step:
        raise DamagedError(f"{file} is that of step {manifest.step}")
    sizes = {name: flat.size for name, flat in manifest.arrays.items()}
    if fault := find_fault(manifest.about, manifest.step, sizes):
        raise DamagedError(f"{file}: {fault}")
    check_pieces(manifest)
    return manifest


def parse(text: str | bytes) -> Manifest:
    """Return the manifest that JSON `text` holds; raise pydantic.ValidationError."""
    return _MANIFEST_ADAPTER.validate_json(text)


def _read_table(file: Path) -> dict[str, Any]:
    try:
        data = files.read_bytes(file, MAX_MANIFEST_BYTES, parts.LEVELS)
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


def _hash_table(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
