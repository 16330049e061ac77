"""Settings with several values, as `--set optimizer.rate=0.1,0.3`, and their combinations.

    a=1,2            two values        a="x,y"        one text
    a=[1,2]          one list          a=[1,2],[3]    two lists

A comma outside of brackets and quotes separates values. Keys of NAME_LISTS take names with commas
as one list, so only lists in brackets are several values of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted

MAX_MEMBERS = 1000  #: of a sweep: as many tasks as Slurm's default allows an array
NAME_LISTS = ("run.metrics", "log.to")
_TOKENS = re.compile(r"""\s+|"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\[\]{},]+|.""", re.S)
_MAX_NAME = 100  #: characters of a member's name
_MAX_LISTED = 8  #: values of a key in a line


@dataclass(frozen=True)
class Axes:
    """The settings of a sweep: those of one value, and the values of each other key."""

    fixed: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]  #: "table.key" -> texts in TOML

    def combine(self) -> list[dict[str, str]]:
        """Return the value of each key for each member; the last key's values change first.

        Raises UsageError for more than MAX_MEMBERS.
        """
        count = math.prod(map(len, self.values.values()))
        if count > MAX_MEMBERS:
            sizes = " x ".join(str(len(values)) for values in self.values.values())
            raise UsageError(
                f"a sweep has at most {MAX_MEMBERS:,} members, seen {count:,} ({sizes} values)"
            )
        return [
            dict(zip(self.values, values, strict=True)) for values in product(*self.values.values())
        ]


def read_axes(settings: Iterable[str]) -> Axes:
    """Return the axes of `table.key=value` settings; the last setting of a key counts.

    Raises UsageError for an empty value beside a comma.
    """
    latest = {setting.partition("=")[0].strip(): setting for setting in settings}
    axes = {}
    for key, setting in latest.items():
        values = split_values(setting.partition("=")[2])
        if len(values) == 1 or (
            key in NAME_LISTS and not all(value.startswith("[") for value in values)
        ):
            continue
        if "" in values:
            raise UsageError(
                f"--set {setting}: expected a value on each side of a comma, seen value "
                f"{values.index('') + 1} of {len(values)} empty"
            )
        axes[key] = tuple(values)
    return Axes(tuple(text for key, text in latest.items() if key not in axes), axes)


def split_values(text: str) -> list[str]:
    """Return the parts of `text` between commas outside of brackets and quotes.

    A text with unbalanced brackets is one value.
    """
    depth, values = 0, [""]
    for token in _TOKENS.findall(text):
        depth += (token in "[{") - (token in "]}")
        if token == "," and depth == 0:
            values.append("")
        else:
            values[-1] += token
    return [value.strip() for value in values] if depth == 0 else [text.strip()]


def name_members(members: Iterable[Mapping[str, str]]) -> list[str]:
    """Return a folder's name for each member, such as `rate=0.1_momentum=0.9`.

    Keys are named without their table where that tells them apart. A name that is long or not its
    member's alone begins with the member's number.
    """
    members = list(members)
    short_names = Counter(key.rpartition(".")[2] for member in members[:1] for key in member)

    def name(key: str, value: str) -> str:
        short_name = key.rpartition(".")[2]
        word = f"{short_name if short_names[short_name] == 1 else key}={value.strip(chr(34))}"
        return re.sub(r"[^A-Za-z0-9.=+-]+", "-", word)

    names = ["_".join(name(*pair) for pair in member.items()) for member in members]
    counts = Counter(names)
    return [
        text
        if counts[text] == 1 and len(text) <= _MAX_NAME and not text.startswith((".", "-"))
        else f"{number:04}_{text}"[:_MAX_NAME]
        for number, text in enumerate(names, start=1)
    ]


def describe(values: Mapping[str, str]) -> str:
    """Return the values of a member in a line."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def announce(axes: Axes) -> str:
    """Return the keys of a sweep with their values, in a line."""
    texts = (f"{key} ({', '.join(_shorten(values))})" for key, values in axes.values.items())
    count = math.prod(map(len, axes.values.values()))
    return f"a sweep of {counted(count, 'member')} over {' and '.join(texts)}"


def _shorten(values: Sequence[str]) -> Sequence[str]:
    return values if len(values) <= _MAX_LISTED else [*values[:_MAX_LISTED], "..."]
