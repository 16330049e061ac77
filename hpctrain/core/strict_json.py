"""JSON for other programs (RFC 8259), which has no word for NaN and infinities."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

#: The entry of an object that names its entries with a number that is not finite, written as null.
NOT_FINITE = "not_finite"


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON, with null for numbers that are not finite, named by `not_finite`."""
    return json.dumps(_replace_invalid(value), indent=indent, allow_nan=False)


def _replace_invalid(value: Any) -> Any:
    if isinstance(value, Mapping):
        invalid_names = [name for name, entry in value.items() if _holds_invalid(entry)]
        entries = {name: _replace_invalid(entry) for name, entry in value.items()}
        return entries | {NOT_FINITE: invalid_names} if invalid_names else entries
    if isinstance(value, list | tuple):
        return [_replace_invalid(entry) for entry in value]
    return None if _holds_invalid(value) else value


def _holds_invalid(value: Any) -> bool:
    """Return whether `value` is, or is a list with, a number that is not finite."""
    if isinstance(value, list | tuple):
        return any(map(_holds_invalid, value))
    return isinstance(value, float) and not isfinite(value)
