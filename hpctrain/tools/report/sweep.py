"""The members of a sweep beside each other, by the recipe's metric, and the best of them.

The metric is `[checkpoint] keep_best`, else the one of `[early_stop]`, with a member's best value;
else the result of a run, see history.py, with its last value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.core import config
from hpctrain.core.config import sweep as settings
from hpctrain.core.config import toml
from hpctrain.core.fitted_table import make_table, print_table
from hpctrain.core.metrics import Criterion, make_criterion
from hpctrain.core.printing import say
from hpctrain.core.run_files import sweep_folder
from hpctrain.tools.report import history, record
from hpctrain.tools.report.history import DEFAULT_WIDTH, DONE, RESULTS
from hpctrain.tools.report.record import RunRecord
from hpctrain.training.callbacks import EarlyStop
from hpctrain.training.run_options import CheckpointOptions


@dataclass(frozen=True)
class MemberResult:
    """A member with its result; None where its files do not tell."""

    name: str
    values: Mapping[str, str]  #: "table.key" -> text in TOML
    status: str
    value: float | None
    steps: int | None
    wall_s: float | None


@dataclass(frozen=True)
class SweepResult:
    """The members of a sweep, the best first, those without a value last."""

    folder: Path
    criterion: Criterion | None  #: None before any member has a result
    members: Sequence[MemberResult]

    @property
    def best(self) -> MemberResult | None:
        """The best member that is done."""
        return next((m for m in self.members if m.status == DONE and m.value is not None), None)

    @property
    def runs(self) -> tuple[Path, ...]:
        """The folders of the runs that have begun."""
        return tuple(self.folder / m.name for m in self.members if m.status != history.WAITING)

    def as_json(self) -> dict[str, Any]:
        metric, direction = self.criterion or (None, None)
        return {
            "sweep": str(self.folder),
            "metric": metric,
            "direction": direction,
            "best": self.best.name if self.best else None,
            "members": [vars(member) for member in self.members],
        }


def compare(folder: Path) -> SweepResult:
    """Return the results of the sweep in `folder`; raise FileError for damaged files."""
    members = sweep_folder.read(folder).members
    entries = history.list_members(folder)
    runs = [
        record.read(folder / member.name)
        if not entry.status.startswith((history.WAITING, history.DAMAGED))
        else RunRecord(member.name)
        for member, entry in zip(members, entries, strict=True)
    ]
    is_named, criterion = True, next(filter(None, map(_read_criterion, runs)), None)
    if criterion is None:
        is_named, criterion = False, _choose_criterion(runs)
    results = [
        MemberResult(
            member.name,
            member.values,
            entry.status,
            _find_value(run, criterion, is_named),
            run.summary.get("steps") or entry.step,
            run.summary.get("wall_s"),
        )
        for member, entry, run in zip(members, entries, runs, strict=True)
    ]
    return SweepResult(folder, criterion, sorted(results, key=lambda m: _sort_key(m, criterion)))


def _read_criterion(run: RunRecord) -> Criterion | None:
    """Return the metric that a run's recipe names; None if it names none."""
    tables = toml.parse(run.recipe, run.folder)
    best = config.read(CheckpointOptions, tables.get("checkpoint", {}), "checkpoint").best
    if best is None and "early_stop" in tables:
        return config.read(EarlyStop, tables["early_stop"], "early_stop").criterion
    return best


def _choose_criterion(runs: Sequence[RunRecord]) -> Criterion | None:
    """Return the first of RESULTS that any run has."""
    keys = {key for run in runs for key in (*run.summary, *(run.rows[-1] if run.rows else ()))}
    name = next((name for name in RESULTS if name in keys), None)
    return make_criterion(name, None, "result") if name else None


def _find_value(run: RunRecord, criterion: Criterion | None, is_best: bool) -> float | None:
    """Return a run's last value of the metric, with `is_best` its best one."""
    if criterion is None:
        return None
    values = [x for row in (*run.rows, run.summary) if (x := row.get(criterion.metric)) is not None]
    if is_best:
        values.sort(key=criterion.goodness)
    return values[-1] if values else None


def _sort_key(member: MemberResult, criterion: Criterion | None) -> float:
    if criterion is None or member.value is None:
        return float("inf")
    return -criterion.goodness(member.value)


def print_result(result: SweepResult) -> None:
    """Print a row per member on stdout, the best first, and the name of the best."""
    metric = result.criterion.metric.replace("_", " ") if result.criterion else "result"
    keys = list(result.members[0].values)
    headings = (*keys, "status", metric, "steps", "wall", "folder")
    rows = [
        (
            *member.values.values(),
            member.status,
            "-" if member.value is None else f"{member.value:.4f}",
            "-" if member.steps is None else f"{member.steps:,}",
            "-" if member.wall_s is None else f"{member.wall_s:,.2f} s",
            member.name,
        )
        for member in result.members
    ]
    table = make_table(headings, rows, *keys, "status", "folder", title=str(result.folder))
    print_table(table, DEFAULT_WIDTH)
    if best := result.best:
        say(f"best: {metric} {best.value:.4f} with {settings.describe(best.values)}")
    else:
        say("best: no member is done")
