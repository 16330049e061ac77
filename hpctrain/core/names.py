"""Names that users type, and the nearest valid one to a name that is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, TypeVar

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

T = TypeVar("T")
#: names of other frameworks, and ours
SYNONYMS = {"lr": "rate", "learning_rate": "rate", "batch_size": "batch", "wd": "weight_decay"}
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in "1 rank" and "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def pick(choices: Mapping[str, T], key: Any, kind: str) -> T:
    """Return `choices[key]`; raise UsageError with the nearest name if there is none."""
    if key is None:
        raise UsageError(f"{kind} is missing; choose one of: {', '.join(choices)}")
    if not isinstance(key, str) or key not in choices:
        raise UsageError(unknown(kind, key, choices))
    return choices[key]


def unknown(kind: str, name: Any, names: Iterable[str]) -> str:
    """Return the message about an unknown `name`: the nearest of `names`, or every name."""
    import difflib  # used for errors alone

    names = list(names)
    name = str(name)
    nearest = [SYNONYMS[name]] if SYNONYMS.get(name) in names else []
    nearest = nearest or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of: {', '.join(names)}"
    return f"unknown {kind} {brief(name)}; {hint}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Return names with consecutive last numbers folded into ranges, such as n[01-12], in order."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        groups.setdefault((prefix, suffix, len(digits)), []).append(int(digits or 0))
    folded = []
    for (prefix, suffix, width), numbers in groups.items():
        for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
            ends = [f"{n:0{width}}" if width else "" for _, n in run]
            text = ends[0] if len(ends) == 1 else f"[{ends[0]}-{ends[-1]}]"
            folded.append(f"{prefix}{text}{suffix}")
    return folded
