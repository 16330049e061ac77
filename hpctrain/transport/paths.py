"""Which way GPU memory takes between two ranks, and why: a verdict, made before the run.

    gdr          GPU -> NIC -> wire -> NIC -> GPU           the MPI is given device pointers
    cuda-aware   GPU -> (the MPI knows how) -> GPU          the MPI is given device pointers
    ipc          GPU -> NVLink, PCIe or the same GPU        mapped memory of a node neighbour
    staged       GPU -> host -> wire -> host -> GPU         the MPI is given host memory

A wrong "cuda-aware" is a segfault, so nothing is believed without a trial that ran as a job of its
own. `STAGED`, the verdict of those who know nothing, hands no device pointer to MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Path = Literal["gdr", "cuda-aware", "ipc", "staged"]
#: The paths on which MPI is given device pointers.
BY_POINTER: tuple[Path, ...] = ("gdr", "cuda-aware")


class Place(NamedTuple):
    """Where a rank's arrays lie: the node, and the GPU by a name that all processes share."""

    node: str
    gpu: str  #: its UUID; "" for a rank without a GPU


@dataclass(frozen=True)
class Verdict:
    """The path for each class of pairs, and why it is no better one."""

    same_gpu: Path
    same_node: Path
    across: Path
    reason: str


#: What holds without a trial: the host's memory everywhere, neighbours' where handles open.
STAGED = Verdict("ipc", "ipc", "staged", "no trial was made")


def path_to(verdict: Verdict, here: Place, there: Place) -> Path:
    """Return the path between `here` and `there`."""
    if here.node != there.node:
        return verdict.across
    return verdict.same_gpu if here.gpu == there.gpu and here.gpu else verdict.same_node
