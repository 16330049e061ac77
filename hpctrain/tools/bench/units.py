"""Parse speeds, times and numbers of ranks: `400Gbit`, `50GB/s`, `2us`, `2:65536`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.core import config
from hpctrain.core.errors import UsageError

#: bytes per second
BYTES_PER_S = {"Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MAX_RANKS = 1 << 20


def parse_speed(text: str, option: str) -> float:
    """Return the bytes per second of 400Gbit, 2.5gbit/s, 50GB/s and so on; raise UsageError."""
    return _parse_quantity(
        text.removesuffix("/s"), BYTES_PER_S, option, "a speed such as 400Gbit or 50GB/s"
    )


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of texts such as 2us or 1.5ms; raise UsageError."""
    return _parse_quantity(text, SECONDS, option, "a time such as 2us or 1.5ms")


def parse_counts(text: str, option: str = "--ranks") -> list[int]:
    """Return the numbers in a text such as `4,64` or `2:4096` (doublings), ascending."""
    quantity = option.removeprefix("--")
    expected = f"expected 1 to {MAX_RANKS} {quantity}, such as 4096, 2,4,8 or 2:65536 (doubling)"
    if not re.fullmatch(r"\d+(:\d+)?(,\d+(:\d+)?)*", text):
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    counts = {
        count
        for count_range in text.split(",")
        for count in _doublings(*map(int, count_range.split(":")))
    }
    if not counts or min(counts) < 1 or max(counts) > MAX_RANKS:
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    return sorted(counts)


def _doublings(first: int, last: int | None = None) -> list[int]:
    counts = [first]
    while last is not None and 0 < 2 * counts[-1] <= last:
        counts.append(2 * counts[-1])
    return counts if last is None or first <= last else []


def _parse_quantity(text: str, units: Mapping[str, float], option: str, expected: str) -> float:
    quantity_match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if quantity_match is None or float(quantity_match[1]) == 0:
        raise UsageError(f"{option}: expected {expected}, seen '{text}'")
    factors = {name.lower(): factor for name, factor in units.items()}
    if quantity_match[2].lower() not in factors:
        raise UsageError(
            f"{option}: {config.unknown('unit', quantity_match[2], units)}, as in {expected}"
        )
    return float(quantity_match[1]) * factors[quantity_match[2].lower()]
