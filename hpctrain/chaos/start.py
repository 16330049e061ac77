"""Attempts by launcher: processes, or threads of this process."""

from __future__ import annotations

from pathlib import Path

from hpctrain.chaos import attempt, threads
from hpctrain.chaos.attempt import Attempt
from hpctrain.chaos.case import Case, Fault
from hpctrain.chaos.jobs import Order, Place
from hpctrain.chaos.scope import Scope


def train(
    case: Case, place: Place, scope: Scope, order: Order, faults: list[Fault], log: Path
) -> Attempt:
    """Train `case` under `faults`; return how that ended."""
    if order.launcher == "threads":
        return threads.attempt(case, place, order, log)
    return attempt.attempt(case, place, scope, order, faults, log)
