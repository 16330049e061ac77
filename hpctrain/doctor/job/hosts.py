"""Names of nodes as Slurm writes them: n1, n2, n3, n10 are n[1-3,10]."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpctrain.transport.seats import ranges


def listed(hosts: Iterable[str]) -> str:
    """Return `hosts` as one word for srun's --exclude and --nodelist."""
    numbered: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for host in dict.fromkeys(hosts):
        prefix, digits = re.fullmatch(r"(.*?)(\d*)", host, re.DOTALL).groups()  # type: ignore[union-attr]
        if digits:  # those with leading zeros have a width of their own
            width = len(digits) if digits.startswith("0") else 0
            numbered.setdefault((prefix, width), []).append(int(digits))
        else:
            plain.append(host)
    return ",".join([*plain, *(_one(*key, sorted(found)) for key, found in numbered.items())])


def _one(prefix: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    text = re.sub(r"\d+", lambda found: found[0].zfill(width), ranges(numbers))
    return f"{prefix}[{text}]"
