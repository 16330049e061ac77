"""Parse message sizes such as `4B`, `1,5,64KiB`, `4B:128MiB` (doublings), `1MiB:16MiB*4`."""

from __future__ import annotations

import re

from hpctrain.core.errors import UsageError

BYTES_PER_UNIT = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BYTES_PER_UNIT |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "kB": 1000, "MB": 10**6, "GB": 10**9}
EXPECTED_SIZES = "expected sizes such as 4B:128MiB (doubling), 1MiB:64MiB*4 or 1KiB,1MiB"


def parse(text: str, option: str = "--sizes") -> list[int]:
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
    sizes = [min_size]
    while sizes[-1] * growth_factor <= max_size:
        sizes.append(sizes[-1] * growth_factor)
    return sizes


def _parse_size(size_word: str, text: str, option: str) -> int:
    size_match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", size_word.strip())
    if size_match is None or size_match[2] not in BYTES_PER_UNIT:
        raise UsageError(f"{option}: {EXPECTED_SIZES}, seen '{size_word.strip()}' in '{text}'")
    return int(size_match[1]) * BYTES_PER_UNIT[size_match[2]]
