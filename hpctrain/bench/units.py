"""Parse speeds, times and numbers of ranks: `400Gbit`, `50GB/s`, `2us`, `2:65536`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain import config
from hpctrain.core.errors import UsageError

#: bytes per second
SPEEDS = {"Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MOST_RANKS = 1 << 20


def speed(text: str, option: str) -> float:
    """Return the bytes per second of 400Gbit, 2.5gbit/s, 50GB/s and so on; raise UsageError."""
    return _quantity(text.removesuffix("/s"), SPEEDS, option, "a speed such as 400Gbit or 50GB/s")


def seconds(text: str, option: str) -> float:
    """Return the seconds of texts such as 2us or 1.5ms; raise UsageError."""
    return _quantity(text, TIMES, option, "a time such as 2us or 1.5ms")


def ranks(text: str, option: str = "--ranks") -> list[int]:
    """Return the numbers of `text`, such as `4,64` or `2:4096` in doublings, ascending."""
    option_name = option.removeprefix("--")
    expected = (
        f"expected 1 to {MOST_RANKS} {option_name}, such as 4096, 2,4,8 or 2:65536 (doubling)"
    )
    if not re.fullmatch(r"\d+(:\d+)?(,\d+(:\d+)?)*", text):
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    numbers = {n for part in text.split(",") for n in _doublings(*map(int, part.split(":")))}
    if not numbers or min(numbers) < 1 or max(numbers) > MOST_RANKS:
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    return sorted(numbers)


def _doublings(first: int, last: int | None = None) -> list[int]:
    numbers = [first]
    while last is not None and 0 < 2 * numbers[-1] <= last:
        numbers.append(2 * numbers[-1])
    return numbers if last is None or first <= last else []


def _quantity(text: str, units: Mapping[str, float], option: str, expected: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{option}: expected {expected}, seen '{text}'")
    by_name = {name.lower(): factor for name, factor in units.items()}
    if match[2].lower() not in by_name:
        raise UsageError(f"{option}: {config.unknown('unit', match[2], units)}, as in {expected}")
    return float(match[1]) * by_name[match[2].lower()]
