"""`hpctrain pipeline draw | check | predict`: pipelines before a run; needs no MPI."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpctrain.commands._lazy import WholeGroup
from hpctrain.commands._options import FILE_TYPE, add_options, complete_choices, report_packages
from hpctrain.commands.bench_predict import predict
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import make_table, print_table
from hpctrain.core.printing import say
from hpctrain.core.strict_json import to_json
from hpctrain.parallel.schedules import LOOPED, SCHEDULES, make
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.timing import picture
from hpctrain.parallel.timing.clock import Timeline
from hpctrain.parallel.timing.summary import (
    MAX_PAIRS,
    MAX_RANKS,
    RankCosts,
    Summary,
    summarize,
    time_uniform,
)
from hpctrain.tools.bench.units import parse_sizes, size_text

DEFAULT_WIDTH = 160  #: of tables, if stdout is no terminal
CAPTION = "activations: peak, 1 is a rank's for a micro-batch; messages and bytes: sent in a step"
EPILOG = """\b
Examples:
  hpctrain pipeline check --ranks 4 --micro-batches 8
  hpctrain pipeline check --schedule zb-h1 --ranks 8 --micro-batches 32 --activation 64MiB
  hpctrain pipeline draw --schedule zb-v --ranks 4 --micro-batches 8 --plot zb-v.png
  hpctrain pipeline draw --schedule interleaved --chunks 4 --ranks 4 --micro-batches 8

Times are in the unit of --costs; messages take none. docs/parallel.md draws two.
"""


@click.group(cls=WholeGroup, epilog=EPILOG)
def pipeline() -> None:
    """Draw and check pipeline schedules, and predict steps on grids of ranks."""


pipeline.add_command(predict)


def _parse_costs(context: click.Context, parameter: click.Parameter, text: str) -> RankCosts:
    """Return the three numbers in `text`; raise UsageError."""
    try:
        forward, inputs, weights = (float(number) for number in text.split(","))
    except ValueError:
        forward = inputs = weights = math.nan
    if not all(0 < cost < math.inf for cost in (forward, inputs, weights)):
        raise UsageError(
            f"--costs: expected three positive numbers such as 1,1,1, seen '{text}': the times "
            "of forward, gradient of the input and gradient of the weights"
        )
    return forward, inputs, weights


_schedule_options = add_options(
    click.option(
        "--schedule",
        metavar="NAME",
        shell_complete=complete_choices(SCHEDULES),
        help=f"One of: {', '.join(SCHEDULES)}.",
    ),
    click.option("--ranks", type=int, metavar="P", help="Ranks of one pipeline."),
    click.option(
        "--stages", type=int, metavar="S", help="Instead of --ranks: stages over all ranks."
    ),
    click.option(
        "--micro-batches", type=int, required=True, metavar="M", help="Micro-batches of a step."
    ),
    click.option(
        "--chunks",
        "--stages-per-rank",
        "stages_per_rank",
        type=int,
        metavar="V",
        help=f"Stages per rank, of {' and '.join(LOOPED)}; default 2.",
    ),
    click.option(
        "--costs",
        default="1,1,1",
        show_default=True,
        metavar="F,I,W",
        callback=_parse_costs,
        help="Times of a micro-batch on a rank: forward, gradient of the input, of the weights.",
    ),
    click.option(
        "--activation",
        default="1MiB",
        show_default=True,
        metavar="SIZE",
        help="Bytes of a micro-batch between two stages.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead."),
)


@pipeline.command(epilog=EPILOG)
@_schedule_options
def check(schedule: str | None, as_json: bool, **options: Any) -> None:
    """Show step, bubble, memory and messages of one schedule or of every schedule."""
    rows, refusals = _summarize_all([schedule] if schedule else [*SCHEDULES], options)
    if as_json:
        say(to_json({"rows": [asdict(row) for row in rows], "refused": refusals}, indent=1))
        return
    table = make_table(
        ("schedule", "stages", "step", "bubble", "activations", "messages", "bytes", "verdict"),
        map(_schedule_cells, rows),
        *("schedule", "verdict"),
        caption=f"of the ranks with most; {CAPTION}",
    )
    print_table(table, DEFAULT_WIDTH)
    for message in refusals.values():
        say(f"left out: {message}")


@pipeline.command(epilog=EPILOG)
@click.option("--plot", type=FILE_TYPE, metavar="FILE", help="Also draw a plot: .png or .svg.")
@_schedule_options
def draw(schedule: str | None, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Draw the timeline of a schedule as text or as a plot."""
    pipeline_schedule = _make_schedule(schedule, options)
    timeline = time_uniform(pipeline_schedule, options["costs"])
    row = summarize(pipeline_schedule, options["costs"], _boundary_bytes(options))
    title = f"{row.schedule}: {row.ranks} ranks, {row.micro_batches} micro-batches"
    if plot is not None:
        with report_packages():  # late: only plots need matplotlib
            from hpctrain.tools.show.plots import draw_timeline
        draw_timeline(timeline, title, plot)
    if as_json:
        say(to_json({**asdict(row), "actions": _json_actions(timeline)}, indent=1))
        return
    say(title + "\n")
    for line in picture.draw(timeline, shutil.get_terminal_size((80, 24)).columns):
        say(line)
    say(f"\n{picture.legend(timeline)}")
    table = make_table(
        ("rank", "stages", "idle", "activations", "messages", "bytes"),
        (
            (
                str(rank),
                ", ".join(map(str, pipeline_schedule.stages_of(rank))),
                _percent(idle_share),
                f"{row.peak_activations[rank]:.4g}",
                str(row.messages[rank]),
                size_text(row.bytes[rank]),
            )
            for rank, idle_share in enumerate(timeline.idle_shares)
        ),
        caption=CAPTION,
    )
    print_table(table, DEFAULT_WIDTH)
    say(f"step {row.step:.4g}, {row.verdict}")


def _schedule_cells(row: Summary) -> tuple[str, ...]:
    """Return the row of a schedule: of numbers that differ between ranks the largest."""
    return (
        row.schedule,
        str(row.ranks * row.stages_per_rank),
        f"{row.step:.4g}",
        _percent(row.bubble),
        f"{max(row.peak_activations):.4g}",
        str(max(row.messages)),
        size_text(max(row.bytes)),
        row.verdict.partition(" %")[2].lstrip(":, "),  # the bubble has a column
    )


def _percent(share: float) -> str:
    """Return `share` as a text such as "27.3 %"; a share of -0.0 has no sign."""
    return f"{abs(100 * share):.1f} %"


def _summarize_all(
    schedule_names: list[str], options: Mapping[str, Any]
) -> tuple[list[Summary], dict[str, str]]:
    """Return the summaries of `schedule_names`, and why others were refused.

    Raises UsageError if all are refused.
    """
    rows: list[Summary] = []
    refusals: dict[str, str] = {}
    for name in schedule_names:
        is_optional = len(schedule_names) > 1 and name not in LOOPED
        schedule_options = {**options, "stages_per_rank": None} if is_optional else options
        try:
            schedule = _make_schedule(name, schedule_options)
            rows.append(summarize(schedule, options["costs"], _boundary_bytes(options)))
        except UsageError as error:
            refusals[name] = str(error)
    if not rows:
        raise UsageError(next(iter(refusals.values())))
    return rows, refusals


def _make_schedule(name: str | None, options: Mapping[str, Any]) -> PipelineSchedule:
    """Return the schedule of the command line's options; raise UsageError."""
    ranks, stages, stages_per_rank = (
        options[key] for key in ("ranks", "stages", "stages_per_rank")
    )
    if (ranks is None) == (stages is None):
        raise UsageError("expected one of --ranks and --stages, such as --ranks 4")
    if name is None:
        raise UsageError(f"--schedule is missing; choose one of: {', '.join(SCHEDULES)}")
    if stages is not None:
        ranks = _divide_stages(stages, stages_per_rank or make(name, 1, 1).stages_per_rank)
    micro_batches = options["micro_batches"]
    if ranks > MAX_RANKS or ranks * micro_batches * (stages_per_rank or 1) > MAX_PAIRS:
        raise UsageError(
            f"expected at most {MAX_RANKS} ranks and {MAX_PAIRS:,} pairs of a stage and a "
            f"micro-batch, seen {ranks:,} ranks and {micro_batches:,} micro-batches"
        )
    return make(name, ranks, micro_batches, stages_per_rank)


def _divide_stages(stages: int, stages_per_rank: int) -> int:
    if stages < 1 or stages % stages_per_rank:
        lower_multiple = stages // stages_per_rank * stages_per_rank
        raise UsageError(
            f"--stages: expected a multiple of {stages_per_rank} stages per rank, seen {stages}; "
            f"take {max(lower_multiple, 0) + stages_per_rank}"
        )
    return stages // stages_per_rank


def _boundary_bytes(options: Mapping[str, Any]) -> int:
    return parse_sizes(options["activation"], "--activation")[-1]


def _json_actions(timeline: Timeline) -> list[list[dict[str, Any]]]:
    """Return each rank's actions, with start and end."""
    return [
        [
            {**action._asdict(), "start": start, "end": end}
            for action, start, end in zip(*spans, strict=True)
        ]
        for spans in zip(timeline.schedule.actions, timeline.starts, timeline.ends, strict=True)
    ]
