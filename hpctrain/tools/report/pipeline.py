"""The schedule of a pipeline run as a plot: predicted by the clock, measured in a traced step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from hpctrain.core import files
from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.timing.clock import StageCosts, Timeline, run_clock
from hpctrain.tools.report.record import RunRecord
from hpctrain.tools.show.plots import plot_timelines

TRACE = "trace.json"
MARK = '"cat": "stage"'  #: of the lines of a trace that are actions
Spans = list[tuple[float, float]]  #: start and end in seconds
MAX_RANKS, MAX_ACTIONS = 64, 20_000  #: a larger picture would show nothing


def plot_schedule(record: RunRecord) -> Figure | None:
    """Return the plot; None for a run without a pipeline, or with a schedule too large to see."""
    mesh = record.summary.get("mesh")
    if not mesh or "schedule" not in mesh:
        return None
    stages_per_rank = len(mesh["layers"]) // mesh["pipe"]
    schedule = make(mesh["schedule"], mesh["pipe"], mesh["micro_batches"], stages_per_rank)
    if schedule.ranks > MAX_RANKS or sum(map(len, schedule.actions)) > MAX_ACTIONS:
        return None
    # The first replica, in the order of the pipe axis.
    places = sorted((pipe, rank) for rank, (data, pipe) in enumerate(mesh["ranks"]) if data == 0)
    ranks = [rank for _, rank in places]
    steps = list(_traced_steps(record, schedule, ranks))
    costs, source = _costs(mesh, schedule, steps)
    predicted = run_clock(schedule, costs)
    head = f"{record.name}, {schedule.name}"
    timelines = {f"{head}: predicted by the clock from {source}{_idle(predicted)}": predicted}
    if steps:
        measured = sorted(steps, key=lambda timeline: timeline.makespan)[len(steps) // 2]
        title = f"{head}: measured, the median of {len(steps)} traced steps{_idle(measured)}"
        timelines[title] = measured
    has_seconds = steps or mesh["stage_s"]
    return plot_timelines(
        timelines, "time [s]" if has_seconds else "time", [rank_label(mesh, rank) for rank in ranks]
    )


def rank_label(mesh: Mapping[str, Any], rank: int) -> str:
    """Return the name of a rank with its place in the grid, as "rank 3: data 1, stage 1"."""
    data, pipe = mesh["ranks"][rank]
    stages = [str(stage) for stage, owner in enumerate(mesh["placement"]) if owner == pipe]
    return f"rank {rank}: data {data}, stage{'s' * (len(stages) > 1)} {', '.join(stages)}"


def _idle(timeline: Timeline) -> str:
    return f"; idle {timeline.bubble:.0%}"


def _costs(
    mesh: Mapping[str, Any], schedule: PipelineSchedule, steps: Sequence[Timeline]
) -> tuple[StageCosts, str]:
    """Return the costs of stages for the clock, and their source."""
    if steps:
        return _median_costs(schedule, steps), "the times of its actions"
    if mesh["stage_s"]:
        return StageCosts(**mesh["stage_s"]), "the times of its layers"
    return StageCosts(*((1.0,) * schedule.stages for _ in range(3))), "equal stages"


def _median_costs(schedule: PipelineSchedule, steps: Sequence[Timeline]) -> StageCosts:
    """Return the median seconds of the actions of each stage; a B counts as an I."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for timeline in steps:
        for spans in zip(schedule.actions, timeline.starts, timeline.ends, strict=True):
            for (op, stage, _), start, end in zip(*spans, strict=True):
                seconds["I" if op == "B" else op, stage].append(end - start)
    return StageCosts(
        *(
            tuple(median(seconds.get((op, stage), [0.0])) for stage in range(schedule.stages))
            for op in "FIW"
        )
    )


def _traced_steps(
    record: RunRecord, schedule: PipelineSchedule, ranks: Sequence[int]
) -> Iterator[Timeline]:
    """Yield the complete steps of the trace; of several passes in a step the first."""
    actions: dict[int, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for event in _action_events(record):
        actions[event["args"]["step"]][event["pid"]].append(event)
    for by_rank in actions.values():
        if timeline := _timeline(schedule, [by_rank[rank] for rank in ranks]):
            yield timeline


def _action_events(record: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the actions of pipelines in the trace of a run, an event per line."""
    path = record.path / TRACE
    if not path.exists():
        return
    with files.open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if MARK.encode() in line:
                place = f"{path}, line {number}"
                text = files.decoded(line.rstrip(b",\n"), place)
                yield files.as_object(files.parsed_json(text, place), place)


def _timeline(schedule: PipelineSchedule, events: list[list[Any]]) -> Timeline | None:
    """Return the timeline of the first pass of a step; None if it is incomplete."""
    spans: list[Spans] = []
    for actions, own_events in zip(schedule.actions, events, strict=True):
        first_pass = sorted(own_events, key=lambda event: event["ts"])[: len(actions)]
        names = [(e["name"], e["args"]["stage"]) for e in first_pass]
        if names != [(f"{op} {micro}", stage) for op, stage, micro in actions]:
            return None
        spans.append([(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in first_pass])
    begin = min(start for own_spans in spans for start, _ in own_spans)
    return Timeline(
        schedule,
        tuple(tuple(start - begin for start, _ in own_spans) for own_spans in spans),
        tuple(tuple(end - begin for _, end in own_spans) for own_spans in spans),
    )
