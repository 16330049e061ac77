"""Timelines as text: a row per rank, a cell per unit of time.

    rank 0   0 1 2 3 . . .B0--        digits: forward of a micro-batch, `B0--`: its backward
    rank 1   . 0 1 2 3B0--B1--        I and W: gradients of input and parameters; `.`: idle

With several stages per rank a letter follows: `0a` is the rank's first stage, `0b` its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from hpctrain.parallel.timing.clock import Timeline

MAX_BLOCKS = 8  #: a picture that is longer says less than a plot


def draw(timeline: Timeline, width: int = 80) -> list[str]:
    """Return the lines of a picture, in blocks of at most `width` columns below each other."""
    rows = [_draw_cells(timeline, rank) for rank in range(timeline.schedule.ranks)]
    count = max(map(len, rows))
    label_width = len(f"rank {len(rows) - 1}") + 1
    cell_width = len(rows[0][0])
    cells_per_line = max(1, (width - label_width) // cell_width)
    if count > MAX_BLOCKS * cells_per_line:
        return [f"The picture needs {count * cell_width} columns: take --plot FILE.png."]
    lines: list[str] = []
    for first in range(0, count, cells_per_line):
        lines += [""] * bool(lines)
        for rank, row in enumerate(rows):
            text = "".join(row[first : first + cells_per_line])
            lines.append(f"{f'rank {rank}':<{label_width}}{text}".rstrip())
    return lines


def unit(timeline: Timeline) -> float:
    """Return the time of a cell: the shortest action's."""
    return min(
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
    )


def _draw_cells(timeline: Timeline, rank: int) -> list[str]:
    """Return the cells of `rank`, up to the end of the step."""
    schedule, seconds = timeline.schedule, unit(timeline)
    width = 1 + len(str(schedule.micro_batches - 1)) + (schedule.stages_per_rank > 1)
    cells = [".".rjust(width)] * floor(timeline.makespan / seconds + 0.5)
    for label, start, end in _label_actions(timeline, rank):
        first, last = floor(start / seconds + 0.5), floor(end / seconds + 0.5)
        text = label.rjust(width).ljust(width * (last - first), "-")
        cells[first:last] = [text[i : i + width] for i in range(0, len(text), width)]
    return cells


def _label_actions(timeline: Timeline, rank: int) -> Iterator[tuple[str, float, float]]:
    """Yield label, start and end of each action of `rank`."""
    schedule = timeline.schedule
    letters = {stage: chr(ord("a") + i) for i, stage in enumerate(schedule.stages_of(rank))}
    spans = zip(schedule.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    for (op, stage, micro), start, end in spans:
        letter = letters[stage] if len(letters) > 1 else ""
        yield f"{op.removeprefix('F')}{micro}{letter}", start, end


def legend(timeline: Timeline) -> str:
    """Return the meaning of the marks, and the time of a cell."""
    schedule = timeline.schedule
    ops = {action.op for actions in schedule.actions for action in actions}
    marks = ["0 1 2: forward"]
    marks += ["B: backward"] * ("B" in ops)
    marks += ["I, W: gradients of input and weights"] * ("I" in ops)
    marks += ["a, b: the rank's stages"] * (schedule.stages_per_rank > 1)
    return f"{'; '.join(marks)}; a cell: {unit(timeline):.3g}"
