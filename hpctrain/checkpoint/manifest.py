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

from hpctrain.checkpoint.about import fault_of
from hpctrain.checkpoint.format import (
    NAME,
    DamagedError,
    Manifest,
    Written,
    add,
    arrays_of,
    check_pieces,
    part_of,
)
from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.run_files.schemas import first_fault

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 * files.MIB  #: at most; a thousand ranks and ten thousand tensors need 2 MiB
# Errors that reading JSON of an unexpected shape may raise.
_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_MANIFEST = pydantic.TypeAdapter(Manifest)


def assembled(step: int, written: Sequence[Written], about: dict[str, Any]) -> Manifest:
    """Return the manifest of what all ranks have written; raise DamagedError if it is not whole."""
    arrays, state = arrays_of(written), dict[str, int | str]()
    for name, value in (entry for rank in written for entry in rank.state.items()):
        add(state, name, value, "states")
    parts = [part_of(rank.part) for rank in written]
    manifest = Manifest(step=step, arrays=arrays, parts=parts, state=state, about=about)
    check_pieces(manifest)
    return manifest


def to_bytes(manifest: Manifest) -> bytes:
    """Return the file of `manifest`, with its own hash; raise DamagedError if it is too long."""
    table = json.loads(json.dumps(asdict(manifest)))  # as it will be when read
    table["sha256"] = _seal(table)
    data = json.dumps(table, indent=1).encode()
    if len(data) > MANIFEST_BYTES:  # a reader would refuse it
        raise DamagedError(f"its manifest has {len(data)} bytes; expected at most {MANIFEST_BYTES}")
    return data


def read(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path`.

    Raises DamagedError if it is missing or altered, UsageError if it has another format.
    """
    file = path / MANIFEST
    table = _table(file)
    try:
        if table.pop("sha256") != _seal(table):
            raise DamagedError(f"{file} was altered: its own SHA-256 is another")
        number = table["format"]
        newer = number > FORMAT
        manifest = parsed(json.dumps(table)) if number == FORMAT else None
    except pydantic.ValidationError as error:
        raise DamagedError(f"{file} cannot be understood: {first_fault(error)}") from None
    except _NONSENSE as error:
        fault_text = f"{type(error).__name__}: {brief(str(error))[1:-1]}"
        raise DamagedError(f"{file} cannot be understood: {fault_text}") from None
    if manifest is None:
        older = "use it with the hpctrain that wrote it, or start anew in another --out"
        remedy = "install a newer hpctrain" if newer else older
        raise UsageError(f"{path} has format {brief(number)}, expected {FORMAT}; {remedy}")
    _check(path, manifest)
    return manifest


def parsed(text: str | bytes) -> Manifest:
    """Return the manifest that JSON `text` holds; raise pydantic.ValidationError."""
    return _MANIFEST.validate_json(text)


def _check(path: Path, manifest: Manifest) -> None:
    """Raise DamagedError unless the entries of a manifest fit each other and the folder's name."""
    file, named = path / MANIFEST, NAME.fullmatch(path.name)
    if named and int(named[2]) != manifest.step:
        raise DamagedError(f"{file} is that of step {manifest.step}")
    sizes = {name: flat.size for name, flat in manifest.arrays.items()}
    if fault := fault_of(manifest.about, manifest.step, sizes):
        raise DamagedError(f"{file}: {fault}")
    check_pieces(manifest)


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


def _seal(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
