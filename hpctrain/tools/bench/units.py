"""Parse speeds, times, numbers of ranks and sizes of messages.

speeds, times    400Gbit, 50GB/s, 2us, 1.5ms
ranks            4,64 or 2:65536 (doublings)
sizes            4B, `1,5,64KiB`, 4B:128MiB (doublings), 1MiB:16MiB*4
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.core import config
from hpctrain.core.errors import UsageError

#: bytes per second
BYTES_PER_S = {"Mbit": 125e3, "Gbit": 125e6, "Tbit": 125e9, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
MAX_RANKS = 1 << 20
BYTES_PER_UNIT = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
EXPECTED_SIZES = "expected sizes such as 4B:128MiB (doubling), 1MiB:64MiB*4 or 1KiB,1MiB"


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
        for count in _growing(*map(int, count_range.split(":")))
    }
    if not counts or min(counts) < 1 or max(counts) > MAX_RANKS:
        raise UsageError(f"{option}: {expected}, seen '{text}'")
    return sorted(counts)


def _growing(first: int, last: int | None = None, factor: int = 2) -> list[int]:
    counts = [first]
    while last is not None and 0 < factor * counts[-1] <= last:
        counts.append(factor * counts[-1])
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


BYTES_PER_UNIT |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "kB": 1000, "MB": 10**6, "GB": 10**9}


def parse_sizes(text: str, option: str = "--sizes") -> list[int]:
    """Return the sizes of `text` in bytes, ascending, without duplicates; raise UsageError."""
    sizes = {
        size
        for range_text in text.split(",")
        for size in _parse_range(range_text.strip(), text, option)
    }
    return sorted(sizes)


def size_text(size: int) -> str:
    """Return `size` in the largest binary unit that divides its double: 4 B, 8.5 KiB, 3 MiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if size >= BYTES_PER_UNIT[unit] and 2 * size % BYTES_PER_UNIT[unit] == 0:
            return f"{size / BYTES_PER_UNIT[unit]:.10g} {unit}"
    return f"{size} B"


def _parse_range(range_text: str, text: str, option: str) -> list[int]:
    first_text, colon, rest_text = range_text.partition(":")
    if not colon:
        return [_parse_size(first_text, text, option)]
    last_text, _, factor = rest_text.partition("*")
    min_size, max_size = _parse_size(first_text, text, option), _parse_size(last_text, text, option)
    growth_factor = int(factor) if factor.isdigit() else 0 if factor else 2
    if not 1 <= min_size <= max_size or growth_factor < 2:
        raise UsageError(f"{option}: {EXPECTED_SIZES}, from small to large, seen '{text}'")
    return _growing(min_size, max_size, growth_factor)


def _parse_size(size_word: str, text: str, option: str) -> int:
    size_match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", size_word.strip())
    if size_match is None or size_match[2] not in BYTES_PER_UNIT:
        raise UsageError(f"{option}: {EXPECTED_SIZES}, seen '{size_word.strip()}' in '{text}'")
    return int(size_match[1]) * BYTES_PER_UNIT[size_match[2]]
