"""TOML files of users: parsed, and checked against limits that hold for all tables.

The limits that TOML leaves open are set here for recipes and site profiles alike: integers have 64
bits, text is UTF-8 without NUL, which no file name can contain, and tables have limited depth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.core.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEVELS = 32
LIMIT_BYTES = 1 << 20  #: of a file: hundreds of times as long as usual ones
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1  #: signed, and unsigned for seeds
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
# The parser's time grows with the square of a dotted key's parts: hours for a key as long as the
# file.
_DEEP_KEY = re.compile(rf"""(?<![\w"'.-])(?:{_PART}[ \t]*\.[ \t]*){{{LEVELS}}}""")
_LONG_INTEGER = re.compile(r"[0-9_]{1000,}")


class TomlSyntaxError(UsageError):
    """The text is not valid TOML."""


def parse(text: str, source: str) -> dict[str, Any]:
    """Return the tables of `text` from `source`; raise UsageError that names the line."""
    try:
        if (key := _DEEP_KEY.search(text)) is not None:
            raise UsageError(f"{source}{_line(text, key)}: {_TOO_DEEP}")
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{source}: {_TOO_DEEP}") from None
    except tomllib.TOMLDecodeError as error:
        raise TomlSyntaxError(f"{source} is not TOML: {error}") from None
    except UsageError:
        raise
    except ValueError:  # Python's limit for the digits of an integer
        raise UsageError(
            f"{source}{_line(text, _LONG_INTEGER.search(text))}: {_TOO_LONG}"
        ) from None


def must_be_plain(tables: Mapping[str, Any], source: str) -> None:
    """Raise UsageError that names the key for a value of `tables` beyond the limits."""
    for key, fault in _find_faults(tables):
        raise UsageError(f"{source}: {key}: {fault}")


_TOO_DEEP = f"expected at most {LEVELS} levels of tables and lists, seen more"
_TOO_LONG = "expected integers of at most 64 bits, seen one of thousands of digits"


def _find_faults(value: Any, place: str = "", level: int = 0) -> Iterator[tuple[str, str]]:
    if level > LEVELS:
        yield place, _TOO_DEEP
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _find_faults(key, f"a key in [{place}]")
            yield from _find_faults(inner, f"{place}.{key}".lstrip("."), level + 1)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _find_faults(inner, f"{place}.{i}", level + 1)
    elif fault := _find_fault(value):
        yield place, fault


def _find_fault(value: Any) -> str:
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return f"expected an integer of at most 64 bits, seen one of {value.bit_length()}"
    if not isinstance(value, str):
        return ""
    if "\0" in value:
        return f"expected text without NUL, seen one after {value.index(chr(0))} characters"
    try:
        value.encode()
    except UnicodeEncodeError:  # an argument of the command line may be any bytes
        return "expected UTF-8 text, seen other bytes"
    return ""


def _line(text: str, match: re.Match[str] | None) -> str:
    return f", line {text.count(chr(10), 0, match.start()) + 1}" if match else ""
