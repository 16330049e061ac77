"""The result of a check: a row of the table, and whether it should stop a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
