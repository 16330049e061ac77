"""The costs of a pipeline schedule in a row, and the micro-batches that fill its bubble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.schedules.check import check
from hpctrain.parallel.timing.clock import Timeline, run_clock, uniform_costs

MAX_BUBBLE = 0.1  #: a larger one is worth more micro-batches
MAX_RANKS = 256  #: of one pipeline
MAX_PAIRS = 100_000  #: of a stage and a micro-batch; a second or two of the clock

RankCosts = tuple[float, float, float]  #: F, I and W of all stages of a rank together


@dataclass(frozen=True)
class Summary:
    """A schedule's step, in the unit of its costs, and tuples with a number per rank.

    Peaks of activations are in those of a rank's whole share of the layers.
    """

    schedule: str
    ranks: int
    micro_batches: int
    stages_per_rank: int
    step: float
    bubble: float
    peak_activations: tuple[float, ...]
    messages: tuple[int, ...]  #: sent
    bytes: tuple[int, ...]  #: sent
    verdict: str


def summarize(schedule: PipelineSchedule, costs: RankCosts, boundary_bytes: int) -> Summary:
    """Return the summary of `schedule`, on equal stages and without time for messages."""
    report = check(schedule, boundary_bytes)
    timeline = time_uniform(schedule, costs)
    sent = [report.sent(rank) for rank in range(schedule.ranks)]
    return Summary(
        schedule.name,
        schedule.ranks,
        schedule.micro_batches,
        schedule.stages_per_rank,
        timeline.makespan,
        timeline.bubble,
        tuple(peak / schedule.stages_per_rank for peak in report.peak_activations),
        tuple(messages for messages, _ in sent),
        tuple(nbytes for _, nbytes in sent),
        _verdict(schedule, costs, timeline.bubble),
    )


def time_uniform(schedule: PipelineSchedule, costs: RankCosts) -> Timeline:
    """Return the timeline of `schedule` on equal stages, without time for messages."""
    return run_clock(schedule, uniform_costs(schedule, *costs))


def _verdict(schedule: PipelineSchedule, costs: RankCosts, bubble: float) -> str:
    """Return the bubble as a text, and the micro-batches that make it smaller."""
    text = f"bubble {100 * bubble:.0f} %"
    if bubble <= MAX_BUBBLE:
        return f"{text}: ok"
    if schedule.micro_batches < schedule.ranks:
        text += ", since micro-batches are fewer than ranks"
    better = list(_double(schedule, costs))
    if not better:
        return text
    proposals = better[:1] + better[1:][-1:]  # twice as many, and those that make it small
    parts = [f"{count} for {100 * share:.0f} %" for count, share in proposals]
    return f"{text}: take {', '.join(parts).replace(' for', ' micro-batches for', 1)}"


def _double(schedule: PipelineSchedule, costs: RankCosts) -> Iterator[tuple[int, float]]:
    """Yield doublings of the micro-batches and their bubbles, until one is small."""
    bubble = 1.0
    while (
        bubble > MAX_BUBBLE
        and schedule.ranks * schedule.stages_per_rank * schedule.micro_batches < MAX_PAIRS
    ):
        schedule = make(
            schedule.name, schedule.ranks, 2 * schedule.micro_batches, schedule.stages_per_rank
        )
        bubble = time_uniform(schedule, costs).bubble
        yield schedule.micro_batches, bubble
