"""Speeds, times and numbers of ranks as people type them: `400Gbit`, `50GB/s`, `2us`, `2:65536`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain import config
from hpctrain.errors import UsageError

#: bytes per second
SPEEDS = {"Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_RANKS = 1 << 20


def speed(text: str, option: str) -> float:
    """Return bytes per second of words such as 400Gbit, 2.5gbit/s or 50GB/s; raise UsageError."""
    return _quantity(text.removesuffix("/s"), SPEEDS, option, "a speed such as 400Gbit or 50GB/s")


def seconds(text: str, option: str) -> float:
    """Return the seconds of words such as 2us or 1.5ms; raise UsageError."""
    return _quantity(text, TIMES, option, "a time such as 2us or 1.5ms")


def ranks(text: str, option: str = "--ranks") -> list[int]:
    """Return the numbers that `text` lists, `4,64` or `2:4096` in doublings, ascending."""
    what = option.removeprefix("--")
    expected = f"expected 1 to {MOST_RANKS} {what}, such as 4096, 2,4,8 or 2:65536 (doubling)"
    if not re.fullmatch(r"\d+(:\d+)?(,\d+(:\d+)?)*", text):
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    found = {n for part in text.split(",") for n in _doublings(*map(int, part.split(":")))}
    if not found or min(found) < 1 or max(found) > MOST_RANKS:
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    return sorted(found)


def _doublings(first: int, last: int | None = None) -> list[int]:
    found = [first]
    while last is not None and 0 < 2 * found[-1] <= last:
        found.append(2 * found[-1])
    return found if last is None or first <= last else []


def _quantity(text: str, units: Mapping[str, float], option: str, expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{option}: expected {expected}, seen '{text}'")
    by_name = {name.lower(): factor for name, factor in units.items()}
    if match[2].lower() not in by_name:
        raise UsageError(f"{option}: {config.unknown('unit', match[2], units)}, as in {expected}")
    return float(match[1]) * by_name[match[2].lower()]
