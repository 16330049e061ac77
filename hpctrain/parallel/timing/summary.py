"""The costs of a pipeline schedule in a row, and the micro-batches that fill its bubble."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.schedules.check import check
from hpctrain.parallel.timing.clock import StageCosts, Timeline, run_clock, uniform_costs

MAX_BUBBLE = 0.1  #: a larger one is worth more micro-batches
MIN_GAIN = 0.95  #: a bubble that shrinks less by twice as many micro-batches stays
MAX_RANKS = 256  #: of one pipeline
MAX_PAIRS = 100_000  #: of a stage and a micro-batch; a second or two of the clock

RankCosts = tuple[float, float, float]  #: F, I and W of all stages of a rank together


@dataclass(frozen=True)
class Summary:
    """A schedule's step, in the unit of its costs, and tuples with a number per rank.

    Peaks of activations count in activations of a rank's whole share of the layers.
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
        describe_bubble(schedule, uniform_costs(schedule, *costs)),
    )


def time_uniform(schedule: PipelineSchedule, costs: RankCosts) -> Timeline:
    """Return the timeline of `schedule` on equal stages, without time for messages."""
    return run_clock(schedule, uniform_costs(schedule, *costs))


def describe_bubble(schedule: PipelineSchedule, costs: StageCosts, batch: int = 0) -> str:
    """Return the bubble as a text, and the micro-batches that make it smaller.

    `batch`: the samples that the micro-batches share; 0 if any number of micro-batches is possible.
    """
    bubble = run_clock(schedule, costs).bubble
    text = f"bubble {100 * bubble:.0f} %"
    if bubble <= MAX_BUBBLE:
        return f"{text}: ok"
    if schedule.micro_batches < schedule.ranks:
        text += ", since micro-batches are fewer than ranks"
    if (unequal_share := _unequal_share(schedule, costs)) > MAX_BUBBLE / 2:
        text += f", {100 * unequal_share:.0f} % by unequal work of the ranks"
    smaller_bubbles = list(_smaller_bubbles(schedule, costs, bubble, batch))
    if not smaller_bubbles:
        return text
    proposals = (
        smaller_bubbles[:1] + smaller_bubbles[1:][-1:]
    )  # twice as many, and those that make it small
    proposal_texts = [f"{count} for {100 * share:.0f} %" for count, share in proposals]
    return f"{text}: take {', '.join(proposal_texts).replace(' for', ' micro-batches for', 1)}"


def _unequal_share(schedule: PipelineSchedule, costs: StageCosts) -> float:
    """Return the idle time that remains with any number of micro-batches, as a share of a step."""
    seconds = [sum(stage) for stage in zip(*vars(costs).values(), strict=True)]
    work = [sum(seconds[s] for s in schedule.stages_of(rank)) for rank in range(schedule.ranks)]
    return 1 - sum(work) / len(work) / max(work)


def _smaller_bubbles(
    schedule: PipelineSchedule, costs: StageCosts, bubble: float, batch: int
) -> Iterator[tuple[int, float]]:
    """Yield numbers of micro-batches and their bubbles, until a bubble is small or stays as it is.

    Each number is at least twice its predecessor: the remaining idle time is of unequal stages.
    """
    while bubble > MAX_BUBBLE:
        last_bubble, least = bubble, 2 * schedule.micro_batches
        # The least divisor of the batch from `least` up; 0 if there is none.
        counts = range(least, batch + 1) if batch else [least]
        count = next((n for n in counts if batch % n == 0), 0)
        if not count or schedule.stages * count > MAX_PAIRS:
            return
        try:
            schedule = make(schedule.name, schedule.ranks, count, schedule.stages_per_rank)
        except UsageError:  # interleaved takes multiples of the ranks
            return
        bubble = run_clock(schedule, costs).bubble
        if bubble > MIN_GAIN * last_bubble:
            return
        yield count, bubble
