"""safetensors: tensors of a file by their name, mapped to memory; only rows in use are read.

length of the header, 8 bytes | header, JSON: name -> dtype, shape, data_offsets | the numbers
"""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from hpctrain.core.errors import UsageError
from hpctrain.core.files import open_regular
from hpctrain.core.names import pick
from hpctrain.core.opening import NAMED
from hpctrain.data.formats.arrays import Part, ReadRows, must_be_numbers
from hpctrain.data.formats.libraries import faults_of
from hpctrain.data.stored import map_range, take_rows

_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
_EXPECTED = "a safetensors file"


def probe(path: Path, keys: tuple[str, ...]) -> list[Part]:
    """Return the tensors `keys` of a file; raise UsageError for another file or dtype."""
    header = _read_header(path)
    return [_probe_tensor(path, header, key) for key in keys]


def list_keys(path: Path) -> list[str]:
    """Return the names of a file's tensors."""
    return list(_read_header(path))


def _read_header(path: Path) -> dict[str, Any]:
    """Return the entries of the header, which the library has checked, by name."""
    with open_regular(path, NAMED) as file, faults_of(str(path), _EXPECTED):
        safetensors.safe_open(path, framework="np")  # checks the whole header
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: {**entry, "offset": 8 + length + entry["data_offsets"][0]}
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _probe_tensor(path: Path, header: dict[str, Any], key: str) -> Part:
    entry, place = pick(header, key, f"tensor in {path}:"), f"{path}: {key}"
    if entry["dtype"] not in _DTYPES:
        raise UsageError(
            f"{place}: expected one of {', '.join(_DTYPES)}, seen {entry['dtype']}; write it as F32"
        )
    shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
    must_be_numbers(dtype, shape, place)
    open_rows = partial(_open_rows, path, dtype, shape, entry["offset"])
    return Part(place, shape, dtype, None, open_rows, "mapped", in_any_order=True)


def _open_rows(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> ReadRows:
    with open_regular(path, NAMED) as file:
        array = map_range(file, path, dtype, shape, offset)
    return partial(take_rows, array)
