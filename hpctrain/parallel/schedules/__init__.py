"""Pipeline schedules by name; `make` is the way to them."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.core.names import pick
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.schedules.breadth_first import breadth_first
from hpctrain.parallel.schedules.dualpipe_v import dualpipe_v
from hpctrain.parallel.schedules.gpipe import gpipe
from hpctrain.parallel.schedules.interleaved import interleaved
from hpctrain.parallel.schedules.one_forward_one_backward import one_forward_one_backward
from hpctrain.parallel.schedules.zb_h1 import zb_h1
from hpctrain.parallel.schedules.zb_v import zb_v

#: Each is called with (ranks, micro_batches) and, if not its default, stages_per_rank.
SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}
#: those that take any number of stages per rank from 2 up
LOOPED = ("interleaved", "breadth-first")


def make(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> PipelineSchedule:
    """Return the pipeline schedule `name`; None: its usual number of stages per rank.

    Raises UsageError for an unknown name and for numbers that the schedule does not take.
    """
    function = pick(SCHEDULES, name, "pipeline schedule")
    counts = () if stages_per_rank is None else (stages_per_rank,)
    return function(ranks, micro_batches, *counts)
