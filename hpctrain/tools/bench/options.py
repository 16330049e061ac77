"""Options that several benchmarks share, and their checks; validation needs no MPI."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

from hpctrain.core.errors import UsageError

MATPLOTLIB_HINT = "--plot needs matplotlib; run: pip install 'hpctrain[report]'"
Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Validated options of every benchmark: the files that it writes."""

    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        """Raise UsageError for a `plot` that cannot be drawn."""
        check_plot_path(self.plot)


@dataclass(frozen=True, kw_only=True)
class RivalOptions(Options, Generic[Plan]):
    """Validated options of a benchmark beside other libraries."""

    plan: Plan
    rivals: list[str]


def split_words(text: str) -> Iterable[str]:
    """Return the comma-separated words of `text` without duplicates."""
    return dict.fromkeys(word.strip() for word in text.split(",") if word.strip())


def require_minimum(flag: str, number: int, minimum: int) -> int:
    """Return `number`; raise UsageError if it is less than `minimum`."""
    if number < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, seen {number}")
    return number


def check_plot_path(plot: Path | None) -> None:
    """Raise UsageError if `plot` has another suffix than .png or .svg, or without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: expected a name that ends in .png or .svg, seen '{plot}'")
    try:
        import_module("hpctrain.tools.bench.plot")
    except ImportError as error:
        raise UsageError(f"{MATPLOTLIB_HINT} ({error})") from None
