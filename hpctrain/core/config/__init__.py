"""From tables (TOML, command line) to frozen options, strictly: an unknown key is an error."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, cast

import pydantic
import pydantic.dataclasses
from typing_extensions import dataclass_transform

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.names import pick, unknown

__all__ = [
    "Names",
    "OptionsError",
    "options",
    "pick",
    "read",
    "read_kind",
    "split_names",
    "unknown",
]

T = TypeVar("T")


def split_names(value: Any) -> Any:
    """Return the names in a text with commas; any other value as it is."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


#: The type of an option: a list of names, also given as one text with commas.
Names = Annotated[list[str], pydantic.BeforeValidator(split_names)]
_MISSING = ("missing", "missing_argument")
_MAX_FAULTS = 10  #: of one table that an error lists: a list may have thousands


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(pydantic.Field,))
def options(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that checks its fields, whether made from a file or in code."""
    strict = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    strict_cls = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)(cls)
    validate = strict_cls.__init__

    def init(self: Any, /, *args: Any, **fields: Any) -> None:  # a field may be called "self"
        try:
            validate(self, *args, **fields)
        except pydantic.ValidationError as error:
            raise OptionsError(cls.__name__, list(strict_cls.__pydantic_fields__), error) from None

    # Assigned afterwards: pydantic itself makes nested options without calling it.
    strict_cls.__init__ = functools.wraps(validate)(init)  # type: ignore[assignment, method-assign]
    return cast("type[T]", strict_cls)


class OptionsError(UsageError):
    """Options that are unknown, missing or have a wrong value; all faults, a line each."""

    def __init__(self, name: str, keys: list[str], error: pydantic.ValidationError):
        # An unknown key first: it may be a misspelling of the missing one.
        self._errors = sorted(error.errors(), key=lambda e: e["type"] in _MISSING)
        self._keys = keys
        super().__init__(self.text(name))

    def text(self, name: str, more_keys: Iterable[str] = ()) -> str:
        """Return the faults as lines about the options or the table `name`."""
        keys = [*self._keys, *more_keys]
        faults = [_describe_error(error, keys, name) for error in self._errors[:_MAX_FAULTS]]
        omitted_count = len(self._errors) - _MAX_FAULTS
        return "\n".join([*faults, *[f"{name} and {omitted_count} more"] * (omitted_count > 0)])


def read(cls: type[T], table: Any, name: str, more_keys: Iterable[str] = ()) -> T:
    """Return `cls(**table)`; raise UsageError with all faults of table `[name]`, a line each.

    `more_keys`: keys that the table may have beside the fields of `cls`.
    """
    if not isinstance(table, Mapping):
        raise UsageError(f"[{name}] expected a table, seen {brief(table)}")
    try:
        return cls(**table)
    except OptionsError as error:
        raise UsageError(error.text(f"[{name}]", more_keys)) from None


def read_kind(
    kinds: Mapping[str, type[T]],
    table: Mapping[str, Any],
    name: str,
    more_keys: Iterable[str] = (),
) -> T:
    """Return the options of the class that `kind` in table `[name]` selects."""
    table = dict(table)
    kind = pick(kinds, table.pop("kind", None), f"[{name}] kind")
    return read(kind, table, name, more_keys)


def _describe_error(error: Any, keys: Iterable[str], name: str) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return unknown(f"key in {name}:", key, keys)
    if error["type"] in _MISSING:
        return f"{name} {key} is missing"
    if error["type"] == "unexpected_positional_argument":
        usage_text = f"{name}({', '.join(f'{key}=...' for key in keys)})"
        return f"{name} takes its options by name, seen {brief(error['input'])}; write {usage_text}"
    if not key and "error" in error.get("ctx", {}):
        return str(error["ctx"]["error"])  # a check of several options together
    return f"{name} {key}: {error['msg'].lower()}, seen {brief(error['input'])}"
