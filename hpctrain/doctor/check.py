"""What a check found: a row of the table, and whether it should stop a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "slow", "bad"]


@dataclass(frozen=True)
class Check:
    """One thing looked at: "bad" breaks runs, "slow" costs time, a "note" is for who wonders."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 if something would break a run, else 0."""
    return int(any(check.verdict == "bad" for check in checks))
