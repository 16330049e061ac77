"""Attempts by launcher: processes, or threads of this process."""

from __future__ import annotations

from pathlib import Path

from hpctrain.tools.chaos import attempt, threads
from hpctrain.tools.chaos.attempt import Attempt
from hpctrain.tools.chaos.case import Case, Fault
from hpctrain.tools.chaos.jobs import Order, Place
from hpctrain.tools.chaos.scope import Scope


def train(
    case: Case, place: Place, scope: Scope, order: Order, faults: list[Fault], log: Path
) -> Attempt:
    """Train `case` under `faults`; return how that ended."""
    if order.launcher == "threads":
        return threads.attempt(case, place, order, log)
    return attempt.attempt(case, place, scope, order, faults, log)
