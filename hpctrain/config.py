"""From tables (TOML, command line) to frozen options, strictly: an unknown key is an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import pydantic
import pydantic.dataclasses
from typing_extensions import dataclass_transform

from hpctrain.errors import UsageError
from hpctrain.files import brief

T = TypeVar("T")
_MISSING = ("missing", "missing_argument")
_MOST_FAULTS = 10  #: of one table that an error lists: a list may have thousands


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(pydantic.Field,))
def options(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that checks its fields, wherever it is made: file or code."""
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)(cls)
    return cast("type[T]", made)


def read(cls: type[T], table: Any, name: str) -> T:
    """Return `cls(**table)`; raise UsageError with all faults of table `[name]`, a line each."""
    if not isinstance(table, Mapping):
        raise UsageError(f"[{name}] expected a table, seen {brief(table)}")
    try:
        return cls(**table)
    except pydantic.ValidationError as error:
        known = list(cls.__pydantic_fields__)  # type: ignore[attr-defined]
        # an unknown name first: what is missing may be what it was meant to be
        errors = sorted(error.errors(), key=lambda e: e["type"] in _MISSING)
        faults = [_fault(e, known, name) for e in errors[:_MOST_FAULTS]]
        more = [f"[{name}] and {len(errors) - _MOST_FAULTS} more"] * (len(errors) > _MOST_FAULTS)
        raise UsageError("\n".join(faults + more)) from None


def read_kind(kinds: Mapping[str, type[T]], table: Mapping[str, Any], name: str) -> T:
    """Return the options that `kind` of table `[name]` asks for."""
    table = dict(table)
    kind = pick(kinds, table.pop("kind", None), f"[{name}] kind")
    return read(kind, table, name)


def pick(choices: Mapping[str, T], key: Any, what: str) -> T:
    """Return `choices[key]`; raise UsageError that tells the nearest name."""
    if key is None:
        raise UsageError(f"{what} is missing; choose one of: {', '.join(choices)}")
    if not isinstance(key, str) or key not in choices:
        raise UsageError(unknown(what, key, choices))
    return choices[key]


def unknown(what: str, seen: Any, known: Iterable[str]) -> str:
    """Return the sentence that says `seen` is no name of ours, and which name is nearest."""
    known = list(known)
    near = difflib.get_close_matches(str(seen), known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"choose one of: {', '.join(known)}"
    return f"unknown {what} {brief(str(seen))}; {hint}"


def _fault(error: Any, known: Iterable[str], name: str) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown(f"key in [{name}]:", key, known)
    if error["type"] in _MISSING:
        return f"[{name}] {key} is missing"
    if not key and "error" in error.get("ctx", {}):
        return str(error["ctx"]["error"])  # what the options say of each other
    return f"[{name}] {key}: {error['msg'].lower()}, seen {brief(error['input'])}"
