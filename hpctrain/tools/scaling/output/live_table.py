"""The progress of a study while its trials run: a row per size, a line per change in a log.

    ranks   state                  job       repeats   step         samples/s   efficiency
        1   measured               17, 19     2 of 2   -               12,674       100.0%
        2   1 running, 1 pending   18, 20     0 of 2   120 of 241           -            -   Resources: ...

Pure functions of the trials' statuses, which the runner keeps; `LiveView` shows changes.
Samples/s and efficiency are means over the repeats measured so far.
"""  # noqa: E501

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType

from rich.live import Live
from rich.table import Column, Table

from hpctrain.core import progress
from hpctrain.core.fitted_table import fit_table
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output import tables
from hpctrain.tools.scaling.results import SizeTrials, group_trials
from hpctrain.tools.scaling.study import Study, TrialKey
from hpctrain.tools.scaling.trial_recipe import Size

WAITING, SUBMITTED, RUNNING = "waiting", "submitted", "running"
MEASURED, FAILED = "measured", "failed"
STYLES = {RUNNING: "bold", MEASURED: "green", FAILED: "red"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialStatus:
    """The status of a trial; `state` may also be any state of Slurm, in lower case."""

    state: str = WAITING
    job: int | None = None  #: of Slurm
    step: int | None = None  #: the last in its metrics
    reason: str = ""
    trial: TrialResult | None = None

    @staticmethod
    def from_outcome(outcome: TrialResult | Gap, job: int | None = None) -> TrialStatus:
        """Return the status of a trial that has ended."""
        if isinstance(outcome, Gap):
            return TrialStatus(FAILED, job, reason=outcome.reason)
        return TrialStatus(MEASURED, job, trial=outcome)


Statuses = Mapping[TrialKey, TrialStatus]


@dataclass(frozen=True)
class SizeStatus:
    """The state of a size and its means so far."""

    size: Size
    statuses: tuple[TrialStatus, ...]  #: by repeat
    samples_per_s: float | None
    efficiency: float | None

    @property
    def state(self) -> str:
        """The states of its trials that are not measured, counted; `measured` if all are."""
        open_states = Counter(status.state for status in self.statuses if status.state != MEASURED)
        if len(self.statuses) == 1 or not open_states:
            return next(iter(open_states), MEASURED)
        return ", ".join(f"{count} {state}" for state, count in open_states.items())

    @property
    def measured(self) -> int:
        """The number of its trials that are measured."""
        return sum(status.state == MEASURED for status in self.statuses)

    @property
    def step(self) -> int | None:
        """The last step of the running trial that is furthest ahead."""
        steps = [status.step for status in self.statuses if status.step is not None]
        return max(steps, default=None)


def rows(study: Study, statuses: Statuses) -> list[SizeStatus]:
    """Return a row for each size of the study."""
    statuses_by_size = {
        size: tuple(statuses[key] for key in sorted(statuses) if key[1] == size)
        for size in study.sizes
    }
    outcomes = {
        size: [status.trial or Gap(status.reason) for status in statuses_by_size[size]]
        for size in statuses_by_size
    }
    trials_by_size = {point.size: point for point in group_trials(study, outcomes)}
    base_trials = _base(statuses_by_size, trials_by_size)
    return [
        _row(size, statuses_by_size[size], trials_by_size.get(size), base_trials)
        for size in statuses_by_size
    ]


def _base(
    statuses_by_size: Mapping[Size, Sequence[TrialStatus]],
    trials_by_size: Mapping[Size, SizeTrials],
) -> SizeTrials | None:
    """Return the base size of speed-up and efficiency: None while it may still be measured."""
    for size, statuses in statuses_by_size.items():
        if size in trials_by_size:
            return trials_by_size[size]
        if any(status.state != FAILED for status in statuses):
            return None
    return None


def _row(
    size: Size,
    statuses: tuple[TrialStatus, ...],
    size_trials: SizeTrials | None,
    base_trials: SizeTrials | None,
) -> SizeStatus:
    rate = None if size_trials is None else size_trials.mean("samples_per_s")
    efficiency = (
        None
        if size_trials is None or base_trials is None
        else fmean(size_trials.efficiencies(base_trials))
    )
    return SizeStatus(size, statuses, rate, efficiency)


def table(study: Study, statuses: Statuses, title: str, note: str = "") -> Table:
    """Return the table with a row per size, and `note` below it."""
    nodes = any(size.nodes > 1 for size in study.sizes)
    columns = [
        *(Column(heading, justify="right") for heading in ("ranks", *["nodes"] * nodes)),
        Column("state", min_width=len(MEASURED)),
        *[Column("job", overflow="fold")] * (study.on == "slurm"),
        Column("repeats", justify="right"),
        # As wide as it will get: a table that changes its width is hard to read.
        Column("step", justify="right", min_width=len(_steps(study.timing.total, study))),
        *(Column(heading, justify="right") for heading in ("samples/s", "efficiency")),
        Column("reason", overflow="fold"),
    ]
    grid = Table(*columns, title=title, caption=note, caption_justify="left")
    for row in rows(study, statuses):
        grid.add_row(*_cells(row, study, nodes), style=STYLES.get(row.state))
    return grid


def _cells(row: SizeStatus, study: Study, nodes: bool) -> list[str]:
    return [
        str(row.size.ranks),
        *[str(row.size.nodes)] * nodes,
        row.state,
        *[_jobs(row.statuses) or "-"] * (study.on == "slurm"),
        f"{row.measured} of {len(row.statuses)}",
        "-" if row.step is None else _steps(row.step, study),
        "-" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}",
        "-" if row.efficiency is None else f"{row.efficiency:.1%}",
        "; ".join(dict.fromkeys(status.reason for status in row.statuses if status.reason)),
    ]


def _steps(step: int, study: Study) -> str:
    return f"{step} of {study.timing.total}"


def _jobs(statuses: Sequence[TrialStatus]) -> str:
    return ", ".join(str(status.job) for status in statuses if status.job is not None)


def change_lines(
    study: Study, old_statuses: Statuses, new_statuses: Statuses
) -> Iterator[tuple[int, str]]:
    """Yield the log line of each change, with its level; a new step alone is no change.

    A trial that ended has a line of its own; others of a size with the same change share one.
    """
    efficiency = {row.size: row.efficiency for row in rows(study, new_statuses)}
    keys_by_change: dict[tuple[Size, str, str], list[TrialKey]] = {}
    for key, status in new_statuses.items():
        if status.state in (WAITING, SUBMITTED) or _log_key(status) == _log_key(
            old_statuses.get(key, TrialStatus())
        ):
            continue
        if status.state in (MEASURED, FAILED):
            yield _end_line(study, key, status, efficiency[key[1]])
        else:
            keys_by_change.setdefault((key[1], status.state, status.reason), []).append(key)
    for (_, state, reason), keys in keys_by_change.items():
        jobs = _jobs([new_statuses[key] for key in keys])
        words = [state, f"job{'s' * (len(keys) > 1)} {jobs}" * bool(jobs), reason]
        yield logging.INFO, f"{_label(study, keys)}: {', '.join(filter(None, words))}"


def _log_key(status: TrialStatus) -> tuple[str, int | None, str]:
    return status.state, status.job, status.reason


def _label(study: Study, keys: Sequence[TrialKey]) -> str:
    repeat_numbers = ", ".join(str(repeat + 1) for repeat, _ in keys)
    return f"{keys[0][1].text}, repeat{'s' * (len(keys) > 1)} {repeat_numbers} of {study.repeats}"


def _end_line(
    study: Study, key: TrialKey, status: TrialStatus, efficiency: float | None
) -> tuple[int, str]:
    if status.trial is None:
        return logging.WARNING, f"{_label(study, [key])}: {status.reason}"
    average = "" if efficiency is None else f", efficiency so far {efficiency:.1%}"
    return (
        logging.INFO,
        f"{_label(study, [key])}: {status.trial.samples_per_s:,.0f} samples/s{average}",
    )


class LiveView:
    """The progress display of a study; a context manager that holds the status of each trial."""

    def __init__(self, study: Study):
        self.study = study
        self._statuses: dict[TrialKey, TrialStatus] = dict.fromkeys(study.trials, TrialStatus())
        self._activity, self._start_s, self._end_count = "", 0.0, 0
        console = progress.console()
        can_redraw = console.is_terminal and not console.is_dumb_terminal
        self.is_drawn = log.isEnabledFor(logging.INFO) and can_redraw
        # No thread that draws: it would take a core from the ranks.
        self._live = Live(console=console, auto_refresh=False) if self.is_drawn else None

    def __enter__(self) -> LiveView:
        """Return self; the table appears with the first change."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the table on screen if the study was stopped; else the table of results follows."""
        if self._live:
            self._live.transient = kind is None
            self._live.stop()

    def set_study(self, study: Study, statuses: Mapping[TrialKey, TrialStatus]) -> None:
        """Take the final study, and the statuses of its trials so far."""
        self.study, self._statuses, self._start_s = study, dict(statuses), time.monotonic()
        self._draw()

    def show_activity(self, activity: str) -> None:
        """Show a current activity other than a trial."""
        self._activity = activity
        if self._live:
            self._draw()
        else:
            log.info(activity)

    def update(self, changed: Mapping[TrialKey, TrialStatus]) -> None:
        """Show the new statuses of some trials; in a log only the changes."""
        previous, self._statuses = self._statuses, {**self._statuses, **changed}
        self._activity = ""
        self._end_count += len(_final_keys(self._statuses) - _final_keys(previous))
        if self._live:
            self._draw()
            return
        for level, text in change_lines(self.study, previous, self._statuses):
            log.log(level, text)

    def log_line(self, level: int, text: str) -> None:
        """Log a line; above the table where there is one."""
        if self._live:
            self._live.console.print(text)
        else:
            log.log(level, text)

    def _draw(self) -> None:
        if self._live:
            title = tables.title(self.study)
            live_rows = table(self.study, self._statuses, title, self._note())
            self._live.start()  # for the first time
            self._live.update(fit_table(live_rows, self._live.console), refresh=True)

    def _note(self) -> str:
        """Return the current activity other than a trial; else the time left for trials."""
        remaining = len(self._statuses) - len(_final_keys(self._statuses))
        if self._activity or not (remaining and self._end_count) or self.study.on == "slurm":
            return self._activity
        trial_s = (time.monotonic() - self._start_s) / self._end_count
        return f"about {max(1, round(trial_s * remaining / 60))} min left" if remaining else ""


def _final_keys(statuses: Mapping[TrialKey, TrialStatus]) -> set[TrialKey]:
    return {key for key, status in statuses.items() if status.state in (MEASURED, FAILED)}
