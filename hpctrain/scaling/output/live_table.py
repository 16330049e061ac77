"""The progress of a study while its trials run: a row per size, drawn or logged line by line.

    ranks   state                  job       repeats   step         samples/s   efficiency
        1   measured               17, 19     2 of 2   -               12,674       100.0%
        2   1 running, 1 pending   18, 20     0 of 2   120 of 241           -            -   Resources: ...

Pure functions of the standings of all trials: the runner of trials keeps those, and live_view.py shows
changes. Samples/s and efficiency are means over the repeats measured so far.
"""  # noqa: E501

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.markup import escape
from rich.table import Table

from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.results import Measured, measured
from hpctrain.scaling.study import Key, Study
from hpctrain.scaling.world_sizes import Size

WAITING, SUBMITTED, RUNNING = "waiting", "submitted", "running"
MEASURED, FAILED = "measured", "failed"
STYLES = {RUNNING: "bold", MEASURED: "green", FAILED: "red"}


@dataclass(frozen=True)
class Standing:
    """The standing of a trial; `state` may also be any state of Slurm, in lower case."""

    state: str = WAITING
    job: int | None = None  #: of Slurm
    step: int | None = None  #: the last in its metrics
    reason: str = ""
    trial: Trial | None = None

    @staticmethod
    def of(outcome: Trial | Gap, job: int | None = None) -> Standing:
        """Return the standing of a trial that has ended."""
        if isinstance(outcome, Gap):
            return Standing(FAILED, job, reason=outcome.reason)
        return Standing(MEASURED, job, trial=outcome)


Board = Mapping[Key, Standing]


@dataclass(frozen=True)
class Row:
    """The state of a size and its means so far."""

    size: Size
    standings: tuple[Standing, ...]  #: by repeat
    samples_per_s: float | None
    efficiency: float | None

    @property
    def state(self) -> str:
        """The states of its trials that are not measured, counted; `measured` if all are."""
        left = Counter(standing.state for standing in self.standings if standing.state != MEASURED)
        if len(self.standings) == 1 or not left:
            return next(iter(left), MEASURED)
        return ", ".join(f"{count} {state}" for state, count in left.items())

    @property
    def measured(self) -> int:
        """The number of its trials that are measured."""
        return sum(standing.state == MEASURED for standing in self.standings)

    @property
    def step(self) -> int | None:
        """The last step of the running trial that is furthest ahead."""
        steps = [standing.step for standing in self.standings if standing.step is not None]
        return max(steps, default=None)


def rows(study: Study, board: Board) -> list[Row]:
    """Return a row for each size of the study."""
    by_size = {size: _of(size, board) for size in study.sizes}
    outcomes = {
        size: [standing.trial or Gap(standing.reason) for standing in by_size[size]]
        for size in by_size
    }
    points = {point.size: point for point in measured(study, outcomes)}
    base = _base(by_size, points)
    return [_row(size, by_size[size], points.get(size), base) for size in by_size]


def _of(size: Size, board: Board) -> tuple[Standing, ...]:
    return tuple(board[key] for key in sorted(board) if key[1] == size)


def _base(
    by_size: Mapping[Size, Sequence[Standing]], points: Mapping[Size, Measured]
) -> Measured | None:
    """Return the base size of speed-up and efficiency: None while it may still be measured."""
    for size, standings in by_size.items():
        if size in points:
            return points[size]
        if any(standing.state != FAILED for standing in standings):
            return None
    return None


def _row(
    size: Size, standings: tuple[Standing, ...], point: Measured | None, base: Measured | None
) -> Row:
    rate = None if point is None else point.mean("samples_per_s")
    efficiency = None if point is None or base is None else fmean(point.efficiencies(base))
    return Row(size, standings, rate, efficiency)


def table(study: Study, board: Board, title: str, note: str = "") -> Table:
    """Return the table of all sizes, with `note` below it."""
    drawn = Table(title=escape(title), caption=escape(note), caption_justify="left")
    nodes = any(size.nodes > 1 for size in study.sizes)
    for heading in ("ranks", *["nodes"] * nodes):
        drawn.add_column(heading, justify="right")
    drawn.add_column("state", min_width=len(MEASURED))
    if study.on == "slurm":
        drawn.add_column("job", overflow="fold")
    drawn.add_column("repeats", justify="right")
    # As wide as it will get: a table that changes its width is hard to read.
    drawn.add_column("step", justify="right", min_width=len(_steps(study.timing.total, study)))
    for heading in ("samples/s", "efficiency"):
        drawn.add_column(heading, justify="right")
    drawn.add_column("reason", overflow="fold")
    for row in rows(study, board):
        drawn.add_row(*map(escape, _cells(row, study, nodes)), style=STYLES.get(row.state))
    return drawn


def _cells(row: Row, study: Study, nodes: bool) -> Iterator[str]:
    yield str(row.size.ranks)
    if nodes:
        yield str(row.size.nodes)
    yield row.state
    if study.on == "slurm":
        yield _jobs(row.standings) or "-"
    yield f"{row.measured} of {len(row.standings)}"
    yield "-" if row.step is None else _steps(row.step, study)
    yield "-" if row.samples_per_s is None else f"{row.samples_per_s:,.0f}"
    yield "-" if row.efficiency is None else f"{row.efficiency:.1%}"
    yield "; ".join(dict.fromkeys(standing.reason for standing in row.standings if standing.reason))


def _steps(step: int, study: Study) -> str:
    return f"{step} of {study.timing.total}"


def _jobs(standings: Sequence[Standing]) -> str:
    return ", ".join(str(standing.job) for standing in standings if standing.job is not None)


def news(study: Study, before: Board, after: Board) -> Iterator[tuple[int, str]]:
    """Yield the log line of each change, with its level; a new step alone is no change.

    A trial that ended has a line of its own; others of a size with the same change share one.
    """
    efficiency = {row.size: row.efficiency for row in rows(study, after)}
    alike: dict[tuple[Size, str, str], list[Key]] = {}
    for key, now in after.items():
        if now.state in (WAITING, SUBMITTED) or _logged(now) == _logged(
            before.get(key, Standing())
        ):
            continue
        if now.state in (MEASURED, FAILED):
            yield _ended(study, key, now, efficiency[key[1]])
        else:
            alike.setdefault((key[1], now.state, now.reason), []).append(key)
    for (_, state, reason), keys in alike.items():
        jobs = _jobs([after[key] for key in keys])
        words = [state, f"job{'s' * (len(keys) > 1)} {jobs}" * bool(jobs), reason]
        yield logging.INFO, f"{_named(study, keys)}: {', '.join(filter(None, words))}"


def _logged(standing: Standing) -> tuple[str, int | None, str]:
    return standing.state, standing.job, standing.reason


def _named(study: Study, keys: Sequence[Key]) -> str:
    numbers = ", ".join(str(repeat + 1) for repeat, _ in keys)
    return f"{keys[0][1].text}, repeat{'s' * (len(keys) > 1)} {numbers} of {study.repeats}"


def _ended(study: Study, key: Key, now: Standing, efficiency: float | None) -> tuple[int, str]:
    if now.trial is None:
        return logging.WARNING, f"{_named(study, [key])}: {now.reason}"
    so_far = "" if efficiency is None else f", efficiency so far {efficiency:.1%}"
    return logging.INFO, f"{_named(study, [key])}: {now.trial.samples_per_s:,.0f} samples/s{so_far}"
