"""Pipeline schedules by name, each imported when it is picked; `make` is the way to them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hpctrain.core.names import pick

if TYPE_CHECKING:
    from hpctrain.parallel.schedules.actions import PipelineSchedule

#: The module of each, with a function of the same name that is called with (ranks, micro_batches)
#: and, if not its default, stages_per_rank.
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "one_forward_one_backward",
    "interleaved": "interleaved",
    "breadth-first": "breadth_first",
    "zb-h1": "zb_h1",
    "zb-v": "zb_v",
    "dualpipe-v": "dualpipe_v",
}
#: those that take any number of stages per rank from 2 up
LOOPED = ("interleaved", "breadth-first")


def make(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None
) -> PipelineSchedule:
    """Return the pipeline schedule `name`; None: its usual number of stages per rank.

    Raises UsageError for an unknown name and for numbers that the schedule does not take.
    """
    module = pick(SCHEDULES, name, "pipeline schedule")
    function = getattr(import_module(f"{__name__}.{module}"), module)
    counts = () if stages_per_rank is None else (stages_per_rank,)
    return function(ranks, micro_batches, *counts)
