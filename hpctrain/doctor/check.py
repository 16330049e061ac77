"""The result of a check: a row of the table, whether it should stop a run, the nodes to blame."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpctrain.transport.placement.check import ranges

Verdict = Literal["ok", "note", "slow", "bad"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "slow", "bad")  #: from best to worst


@dataclass(frozen=True)
class Check:
    """Result of one check: "bad" breaks runs, "slow" costs time, a "note" is information."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()  #: to blame, and better left out; only a job has several


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 if something would break a run, else 0."""
    return int(any(check.verdict == "bad" for check in checks))


def node_list(hosts: Iterable[str]) -> str:
    """Return `hosts` as one word for srun's --exclude and --nodelist."""
    parts = [_parts(host) for host in dict.fromkeys(hosts)]
    # n08, n09 and n10 are two digits wide; without a leading zero n9 and n10 form one group.
    padded = {(prefix, len(digits)) for prefix, digits in parts if digits[:1] == "0" != digits}
    numbered: dict[tuple[str, int], list[int]] = {}
    unnumbered: list[str] = []
    for prefix, digits in parts:
        if digits:
            width = len(digits) if (prefix, len(digits)) in padded else 0
            numbered.setdefault((prefix, width), []).append(int(digits))
        else:
            unnumbered.append(prefix)
    return ",".join(
        [*unnumbered, *(_name(*key, sorted(numbers)) for key, numbers in numbered.items())]
    )


def _parts(host: str) -> tuple[str, str]:
    """Return a name without its trailing digits, and these digits."""
    prefix = host.rstrip("0123456789")
    return prefix, host[len(prefix) :]


def _name(prefix: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{prefix}{numbers[0]:0{width}d}"
    text = re.sub(r"\d+", lambda match: match[0].zfill(width), ranges(numbers))
    return f"{prefix}[{text}]"
