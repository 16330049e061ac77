"""A slow, obvious simulator of pipeline schedules: whoever can go on, goes on.

It shares nothing with hpctrain/parallel but the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from hpctrain.parallel.schedules.actions import Action, PipelineSchedule

Group = Sequence[Action]  #: actions taken at once, which end together
Seconds = Callable[[Group], Fraction]


def simulate(
    schedule: PipelineSchedule,
    seconds: Seconds,
    delay: Fraction = Fraction(0),
    fuse: bool = False,
) -> list[list[tuple[Fraction, Fraction]]] | None:
    """Return (start, end) of each group of each rank; None if the ranks wait forever.

    `delay`: of a message; `fuse`: a forward and the backward behind it are taken at once.
    """
    lists = [_groups(actions, fuse) for actions in schedule.actions]
    times: list[list[tuple[Fraction, Fraction]]] = [[] for _ in lists]
    ends: dict[tuple[str, int, int], Fraction] = {}
    while any(len(spans) < len(groups) for spans, groups in zip(times, lists, strict=True)):
        moved = False
        for rank, groups in enumerate(lists):
            if len(times[rank]) == len(groups):
                continue
            group = groups[len(times[rank])]
            ready = [_ready(schedule, ends, rank, action, delay) for action in group]
            if None in ready:
                continue
            start = max([time for time in ready if time is not None] + [_last(times[rank])])
            times[rank].append((start, start + seconds(group)))
            for op, stage, micro in group:
                for letter in "IWB" if op == "B" else op:
                    ends[letter, stage, micro] = times[rank][-1][1]
            moved = True
        if not moved:
            return None
    return times


def makespan(times: list[list[tuple[Fraction, Fraction]]]) -> Fraction:
    return max(_last(spans) for spans in times)


def _last(spans: list[tuple[Fraction, Fraction]]) -> Fraction:
    return spans[-1][1] if spans else Fraction(0)


def _groups(actions: Group, fuse: bool) -> list[Group]:
    groups: list[Group] = []
    for action in actions:
        pair = (*groups[-1], action) if groups else (action,)
        if fuse and [a.op for a in pair] == ["F", "B"] and pair[0].stage != pair[1].stage:
            groups[-1] = pair
        else:
            groups.append((action,))
    return groups


def _ready(
    schedule: PipelineSchedule,
    ends: dict[tuple[str, int, int], Fraction],
    rank: int,
    action: Action,
    delay: Fraction,
) -> Fraction | None:
    """Return when the inputs of `action` are on its rank; None if they are not computed yet."""
    op, stage, micro = action
    inputs = []
    if op == "F" and stage > 0:
        inputs = [("F", stage - 1)]
    elif op in "IB":
        inputs = [("F", stage)] + [("I", stage + 1)] * (stage + 1 < len(schedule.placement))
    elif op == "W":
        inputs = [("I", stage)]
    result = Fraction(0)
    for letter, source in inputs:
        if (letter, source, micro) not in ends:
            return None
        travels = schedule.placement[source] != rank
        result = max(result, ends[letter, source, micro] + delay * travels)
    return result
