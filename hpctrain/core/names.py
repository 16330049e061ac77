"""Names that users type, and the nearest valid one to a name that is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief

T = TypeVar("T")
MAX_DIGITS = 9  #: of a name's number, which may come from a file of others
#: names of other frameworks, and ours
SYNONYMS = {"lr": "rate", "learning_rate": "rate", "batch_size": "batch", "wd": "weight_decay"}


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in "1 rank" and "2 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return "0-3,8" of ascending `numbers`, as the kernel writes lists of cores."""
    runs = [
        [n for _, n in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2,4"."""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


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
    for text in (name, name.lower()):
        nearest = nearest or difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of: {', '.join(names)}"
    return f"unknown {kind} {brief(name)}; {hint}"


def fold_names(names: Iterable[str]) -> list[str]:
    """Return different names as Slurm writes hosts, last numbers in ranges: n[01-03,07]."""
    parts = [_split_last_digits(name) for name in dict.fromkeys(names)]
    # n08, n09 and n10 form a group of two digits; n9 and n10 form a group without leading zeros.
    padded_groups = {
        (prefix, len(digits)) for prefix, digits in parts if digits[:1] == "0" != digits
    }
    numbers_by_group: dict[tuple[str, int], list[int]] = {}
    plain_names: list[str] = []
    for prefix, digits in parts:
        if digits:
            width = len(digits) if (prefix, len(digits)) in padded_groups else 0
            numbers_by_group.setdefault((prefix, width), []).append(int(digits))
        else:
            plain_names.append(prefix)
    groups = (_fold_group(*key, sorted(numbers)) for key, numbers in numbers_by_group.items())
    return [*plain_names, *groups]


def _split_last_digits(name: str) -> tuple[str, str]:
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    return (prefix, digits) if len(digits) <= MAX_DIGITS else (name, "")


def _fold_group(prefix: str, width: int, numbers: list[int]) -> str:
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        texts = [f"{number:0{width}d}" for _, number in run]
        runs.append(texts[0] if len(texts) == 1 else f"{texts[0]}-{texts[-1]}")
    text = ",".join(runs)
    return f"{prefix}[{text}]" if len(numbers) > 1 else f"{prefix}{text}"
