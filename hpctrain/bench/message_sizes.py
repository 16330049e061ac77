"""Parse sizes of the command line: `4B`, `1,5,64KiB`, `4B:128MiB` in doublings, `1MiB:16MiB*4`."""

from __future__ import annotations

import re

from hpctrain.core.errors import UsageError

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "kB": 1000, "MB": 10**6, "GB": 10**9}
EXPECTED = "expected sizes such as 4B:128MiB (doubling), 1MiB:64MiB*4 or 1KiB,1MiB"


def parse(text: str) -> list[int]:
    """Return the sizes of `text` in bytes, ascending, without duplicates; raise UsageError."""
    sizes = {size for part in text.split(",") for size in _sizes(part.strip(), text)}
    return sorted(sizes)


def size_text(size: int) -> str:
    """Return `size` in the largest binary unit that divides it: 4 B, 64 KiB, 3 MiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}"
    return f"{size} B"


def _sizes(part: str, text: str) -> list[int]:
    first, colon, rest = part.partition(":")
    if not colon:
        return [_size(first, text)]
    last, _, factor = rest.partition("*")
    low, high = _size(first, text), _size(last, text)
    step = int(factor) if factor.isdigit() else 0 if factor else 2
    if not 1 <= low <= high or step < 2:
        raise UsageError(f"--sizes: {EXPECTED}, from small to large, seen '{text}'")
    sizes = [low]
    while sizes[-1] * step <= high:
        sizes.append(sizes[-1] * step)
    return sizes


def _size(word: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", word.strip())
    if match is None or match[2] not in UNITS:
        raise UsageError(f"--sizes: {EXPECTED}, seen '{word.strip()}' in '{text}'")
    return int(match[1]) * UNITS[match[2]]
