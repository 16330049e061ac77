"""Progress of a run: a bar on a terminal, plain lines in a batch log, a table at the end.

The rank that draws imports Rich; the others do without. All output goes to stderr: under mpirun a
rank's stdout may look like a terminal though it is not.
`hpctrain launch` knows better than the ranks whether stderr is a terminal, and passes its width in
columns in HPCTRAIN_TERMINAL.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.core.names import counted
from hpctrain.core.printing import LogFormat

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.core.fitted_table import PlainConsole

TERMINAL = "HPCTRAIN_TERMINAL"
BAR_S = 0.1  #: from one drawing of a bar to the next
WIDE_BAR = 64  #: columns beside its title that a bar needs for epoch and samples/s
log = logging.getLogger(__name__)


def console() -> PlainConsole:
    """Return the console on stderr, with the width of the user's terminal."""
    from hpctrain.core.fitted_table import PlainConsole

    width = os.environ.get(TERMINAL, "")
    if width.isdigit():
        return PlainConsole(file=sys.stderr, force_terminal=True, width=int(width))
    return PlainConsole(file=sys.stderr)


def stdout_console(width: int) -> PlainConsole:
    """Return the console on stdout, of `width` columns where stderr is no terminal.

    Under mpirun stdout may look like a terminal though it is not.
    """
    from hpctrain.core.fitted_table import PlainConsole

    terminal = console()
    return PlainConsole(
        file=sys.stdout,
        force_terminal=terminal.is_terminal,
        width=terminal.width if terminal.is_terminal else width,
    )


def show_by_default(rank: int) -> None:
    """Show the lines and the bar of rank 0 in a program that has not configured logging.

    A level of the logger "hpctrain", such as logging.WARNING, or a handler of the root logger is a
    configuration.
    """
    package = logging.getLogger("hpctrain")
    if rank == 0 and not package.hasHandlers() and package.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormat())
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False  # handlers that the program adds later would print lines twice


class Bar:
    """A bar with loss, samples/s and ETA."""

    def __init__(self, title: str, first_step: int, total: int):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._drawn_s = 0.0
        screen = console()
        is_wide = screen.width >= WIDE_BAR + len(title)
        self._progress = Progress(
            TextColumn(
                "{task.description}  epoch {task.fields[epoch]}" if is_wide else "", markup=False
            ),
            BarColumn(bar_width=40 if is_wide else 8),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}", markup=False),
            *([TextColumn("{task.fields[rate]} samples/s", markup=False)] if is_wide else []),
            TextColumn("ETA", markup=False),
            TimeRemainingColumn(),
            console=screen,
            auto_refresh=False,  # a thread that draws would take the core from BLAS
        )
        fields: dict[str, Any] = {"epoch": "-", "loss": "-", "rate": "-"}
        self._task = self._progress.add_task(title, total=total, completed=first_step, **fields)

    def is_due(self, now_s: float) -> bool:
        """Return whether to draw the bar now: drawing takes time from training."""
        if now_s - self._drawn_s < BAR_S:
            return False
        self._drawn_s = now_s
        return True

    def show(
        self, step: int, epoch: int | None, loss: float | None, samples_per_s: float | None
    ) -> None:
        """Draw the state after `step` steps; None where a row does not have it."""
        fields: dict[str, Any] = {"epoch": "-" if epoch is None else epoch}
        fields |= {
            "loss": _format_number(loss, ".4f"),
            "rate": _format_number(samples_per_s, ",.0f"),
        }
        self._progress.start()  # now: lines that are logged at the start would leave a first bar
        self._progress.update(self._task, completed=step, refresh=True, **fields)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False)

    def close(self, step: int) -> None:
        """Leave the bar as it is after `step` steps."""
        self._progress.start()
        self._progress.update(self._task, completed=step, refresh=True)
        self._progress.stop()


def open_bar(title: str, first_step: int, total: int) -> Bar | None:
    """Return a bar that begins at `first_step`; None if stderr is no terminal, or cannot redraw."""
    is_terminal = os.environ.get(TERMINAL, "").isdigit() or sys.stderr.isatty()
    can_redraw = is_terminal and os.environ.get("TERM") != "dumb"
    return Bar(title, first_step, total) if can_redraw else None


def line(row: Mapping[str, Any], total_steps: int) -> str:
    """Return a row of metrics as one line of a log."""
    words = [
        f"step {row['step']}/{total_steps}",
        f"epoch {row.get('epoch', '-')}",
        f"loss {_format_number(row.get('train_loss'), '.4f')}",
        f"{_format_number(row.get('samples_per_s'), ',.0f')} samples/s",
    ]
    words += [f"{name} {value}" for name, value in _test_metrics(row).items() if value != "-"]
    words += filter(None, [describe_lost(row)])
    return "  ".join(words)


def _test_metrics(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics of the test set in words, without its loss and what is no number."""
    metric_keys = [
        key
        for key, value in entries.items()
        if key.startswith("test_") and key != "test_loss" and not isinstance(value, list)
    ]
    return {key.replace("_", " "): _format_number(entries[key], ".4f") for key in metric_keys}


def describe_lost(row: Mapping[str, Any]) -> str:
    """Return the ranks lost since the row before, '' for none."""
    ranks = row.get("lost_ranks") or []
    return f"lost rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def describe_losses(summary: Mapping[str, Any]) -> str:
    """Return the ranks that a run lost and the time that they cost, '' for none.

    ETTR, the effective training time ratio: the part of the time with progress.
    """
    entries = summary.get("recoveries") or []
    if not entries:
        return ""
    lost_count, spares = (
        sum(len(entry.get("ranks", [])) for entry in entries),
        summary.get("spares_used"),
    )
    words = [f"{counted(lost_count, 'rank')} lost"]
    if summary.get("lost_s") is not None:
        words += [f"{summary['lost_s']:.2f} s without progress"]
    if spares is not None:
        words += [f"{counted(spares, 'spare')} used"]
    if summary.get("ettr") is not None:
        words += [f"ETTR {100 * summary['ettr']:.2f} %"]
    return ", ".join(words)


def closing_table(summary: Mapping[str, Any], text: bool = False) -> Table:
    """Return the table that ends a run; for a `text` with bits per byte, the usual measure."""
    from rich.table import Table

    table = Table(title=f"{summary['recipe']}: {summary['status']}", show_header=False)
    wall_s, nats = summary["wall_s"] or 1.0, summary["test_loss"] if text else None
    bits = None if nats is None else nats / math.log(2)
    has_peers, skipped = summary["world_size"] > 1, summary.get("skipped_steps")
    rows = {
        "ended early": summary.get("reason"),
        "suspicious": "; ".join(summary.get("suspicious") or ()),
        "engine": _describe_engine(summary),
        **_test_metrics(summary),
        **({"test bits per byte": _format_number(bits, ".3f")} if text else {}),
        "train loss": _format_number(summary["train_loss"], ".4f"),
        "samples/s": f"{summary['samples_per_s']:,.0f}",
        "wall": f"{summary['wall_s']:.2f} s for {_describe_steps(summary)}",
        "compute": _format_share(summary["compute_s"], wall_s),
        "wait (exposed wire)": has_peers and _format_share(summary["wait_s"], wall_s),
        "wait for data": (wait := summary.get("data_wait_s")) and _format_share(wait, wall_s),
        "wire": has_peers and _format_share(summary["wire_s"], wall_s),
        "steps skipped": skipped and f"{skipped}, whose gradient was not finite",
        "recoveries": describe_losses(summary),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _describe_engine(summary: Mapping[str, Any]) -> str:
    """Return the engine with its ranks, servers and all-reduce, as far as it has them."""
    text = f"{summary['engine']} on {counted(summary['world_size'], 'rank')}"
    if servers := summary.get("servers"):
        text += f", {counted(summary['workers'], 'worker')} and {counted(servers, 'server')}"
    return f"{text}, all-reduce: {summary['algorithm']}" if summary["algorithm"] else text


def _describe_steps(summary: Mapping[str, Any]) -> str:
    """Return the steps that the times cover: a resumed run has timed its last part."""
    steps, first_counted_step = summary["steps"], summary.get("since_step", 0)
    return (
        f"the {steps - first_counted_step} steps after step {first_counted_step}"
        if first_counted_step
        else f"{steps} steps"
    )


def _format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _format_share(seconds: float, wall: float) -> str:
    return f"{seconds:.2f} s ({100 * seconds / wall:.0f} %)"
