"""Tables of pipeline schedules on stdout: a row per schedule, or a row per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from hpctrain.core.fitted_table import fit_table, make_table, stdout_console
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.timing.summary import Summary

DEFAULT_WIDTH = 160  #: if stdout is no terminal

CAPTION = "activations: peak, 1 is a rank's for a micro-batch; messages and bytes: sent in a step"

SizeText = Callable[[int], str]


def print_schedules(rows: Sequence[Summary], size_text: SizeText) -> None:
    """Print a row per schedule: of numbers that differ between ranks the largest."""
    headings = (
        "schedule",
        "stages",
        "step",
        "bubble",
        "activations",
        "messages",
        "bytes",
        "verdict",
    )
    table = make_table(headings, "schedule", "verdict")
    table.caption = f"of the ranks with most; {CAPTION}"
    for row in rows:
        table.add_row(
            row.schedule,
            str(row.ranks * row.stages_per_rank),
            f"{row.step:.4g}",
            percent(row.bubble),
            f"{max(row.peak_activations):.4g}",
            str(max(row.messages)),
            size_text(max(row.bytes)),
            row.verdict.partition(" %")[2].lstrip(":, "),  # the bubble has a column
        )
    _print(table)


def print_ranks(
    schedule: PipelineSchedule,
    row: Summary,
    idle_shares: Sequence[float],
    size_text: SizeText,
) -> None:
    """Print a row per rank of a schedule."""
    table = make_table(("rank", "stages", "idle", "activations", "messages", "bytes"))
    table.caption = CAPTION
    for rank, idle in enumerate(idle_shares):
        table.add_row(
            str(rank),
            ", ".join(map(str, schedule.stages_of(rank))),
            percent(idle),
            f"{row.peak_activations[rank]:.4g}",
            str(row.messages[rank]),
            size_text(row.bytes[rank]),
        )
    _print(table)


def percent(share: float) -> str:
    """Return `share` as a text such as "27.3 %"; a share of -0.0 has no sign."""
    return f"{abs(100 * share):.1f} %"


def _print(table: Table) -> None:
    console = stdout_console(DEFAULT_WIDTH)
    console.print(fit_table(table, console))
