"""How a study stands while its trials run: a row per size, drawn or told line by line.

    ranks   state                  job       repeats   step         samples/s   efficiency
        1   measured               17, 19     2 of 2   -               12,674       100.0%
        2   1 running, 1 pending   18, 20     0 of 2   120 of 241           -            -   Resources: ...

Pure functions of the standings of all trials: whoever runs trials keeps those, and teller.py shows
what changes. Samples/s and efficiency are means over the repeats that are there so far.
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
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Key, Study

WAITING, SUBMITTED, RUNNING = "waiting", "submitted", "running"
MEASURED, FAILED = "measured", "failed"
STYLES = {RUNNING: "bold", MEASURED: "green", FAILED: "red"}


@dataclass(frozen=True)
class Standing:
    """How a trial stands; `state` may also be any of Slurm's words, in small letters."""

    state: str = WAITING
    job: int | None = None  #: of Slurm
    step: int | None = None  #: the last that its metrics tell of
    reason: str = ""
    trial: Trial | None = None

    @staticmethod
    def of(found: Trial | Gap, job: int | None = None) -> Standing:
        """Return the standing of a trial that has ended."""
        if isinstance(found, Gap):
            return Standing(FAILED, job, reason=found.reason)
        return Standing(MEASURED, job, trial=found)


Board = Mapping[Key, Standing]


@dataclass(frozen=True)
class Row:
    """What is known of a size so far."""

    size: Size
    standings: tuple[Standing, ...]  #: by repeat
    samples_per_s: float | None
    efficiency: float | None

    @property
    def state(self) -> str:
        """The states of its trials that are not measured, counted; `measured` if all are."""
        left = Counter(one.state for one in self.standings if one.state != MEASURED)
        if len(self.standings) == 1 or not left:
            return next(iter(left), MEASURED)
        return ", ".join(f"{count} {state}" for state, count in left.items())

    @property
    def measured(self) -> int:
        """How many of its trials are measured."""
        return sum(one.state == MEASURED for one in self.standings)

    @property
    def step(self) -> int | None:
        """The last step of the trial that has come furthest, of those that run."""
        steps = [one.step for one in self.standings if one.step is not None]
        return max(steps, default=None)


def rows(study: Study, board: Board) -> list[Row]:
    """Return a row for each size of the study."""
    by_size = {size: _of(size, board) for size in study.sizes}
    found = {size: [one.trial or Gap(one.reason) for one in by_size[size]] for size in by_size}
    there = {one.size: one for one in measured(study, found)}
    base = _base(by_size, there)
    return [_row(size, by_size[size], there.get(size), base) for size in by_size]


def _of(size: Size, board: Board) -> tuple[Standing, ...]:
    return tuple(board[key] for key in sorted(board) if key[1] == size)


def _base(
    by_size: Mapping[Size, Sequence[Standing]], there: Mapping[Size, Measured]
) -> Measured | None:
    """Return the size that speed-up will be told against: None while it may still come."""
    for size, standings in by_size.items():
        if size in there:
            return there[size]
        if any(one.state != FAILED for one in standings):
            return None
    return None


def _row(
    size: Size, standings: tuple[Standing, ...], one: Measured | None, base: Measured | None
) -> Row:
    rate = None if one is None else one.mean("samples_per_s")
    efficiency = None if one is None or base is None else fmean(one.efficiencies(base))
    return Row(size, standings, rate, efficiency)


def table(study: Study, board: Board, title: str, note: str = "") -> Table:
    """Return how all sizes stand; `note` stands below."""
    drawn = Table(title=escape(title), caption=escape(note), caption_justify="left")
    nodes = any(size.nodes > 1 for size in study.sizes)
    for heading in ("ranks", *["nodes"] * nodes):
        drawn.add_column(heading, justify="right")
    drawn.add_column("state", min_width=len(MEASURED))
    if study.on == "slurm":
        drawn.add_column("job", overflow="fold")
    drawn.add_column("repeats", justify="right")
    # As wide as it will be: a table that grows under the eye is hard to read.
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
    yield "; ".join(dict.fromkeys(one.reason for one in row.standings if one.reason))


def _steps(step: int, study: Study) -> str:
    return f"{step} of {study.timing.total}"


def _jobs(standings: Sequence[Standing]) -> str:
    return ", ".join(str(one.job) for one in standings if one.job is not None)


def news(study: Study, before: Board, after: Board) -> Iterator[tuple[int, str]]:
    """Yield what a log says of each change, with its level; steps alone are none.

    A trial that ended has a line of its own; others of a size that changed alike share one.
    """
    efficiency = {row.size: row.efficiency for row in rows(study, after)}
    alike: dict[tuple[Size, str, str], list[Key]] = {}
    for key, now in after.items():
        if now.state in (WAITING, SUBMITTED) or _told(now) == _told(before.get(key, Standing())):
            continue
        if now.state in (MEASURED, FAILED):
            yield _ended(study, key, now, efficiency[key[1]])
        else:
            alike.setdefault((key[1], now.state, now.reason), []).append(key)
    for (_, state, reason), keys in alike.items():
        jobs = _jobs([after[key] for key in keys])
        words = [state, f"job{'s' * (len(keys) > 1)} {jobs}" * bool(jobs), reason]
        yield logging.INFO, f"{_named(study, keys)}: {', '.join(filter(None, words))}"


def _told(one: Standing) -> tuple[str, int | None, str]:
    return one.state, one.job, one.reason


def _named(study: Study, keys: Sequence[Key]) -> str:
    numbers = ", ".join(str(repeat + 1) for repeat, _ in keys)
    return f"{keys[0][1].said}, repeat{'s' * (len(keys) > 1)} {numbers} of {study.repeats}"


def _ended(study: Study, key: Key, now: Standing, efficiency: float | None) -> tuple[int, str]:
    if now.trial is None:
        return logging.WARNING, f"{_named(study, [key])}: {now.reason}"
    so_far = "" if efficiency is None else f", efficiency so far {efficiency:.1%}"
    return logging.INFO, f"{_named(study, [key])}: {now.trial.samples_per_s:,.0f} samples/s{so_far}"
