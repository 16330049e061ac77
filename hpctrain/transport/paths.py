"""Which way GPU memory takes between two ranks, and why: a verdict, made before the run.

    gdr          GPU -> NIC -> wire -> NIC -> GPU           the MPI is given device pointers
    cuda-aware   GPU -> (the MPI knows how) -> GPU          the MPI is given device pointers
    ipc          GPU -> NVLink, PCIe or the same GPU        mapped memory of a node neighbour
    staged       GPU -> host -> wire -> host -> GPU         the MPI is given host memory

A wrong "cuda-aware" is a segfault, so nothing is believed without a trial that ran as a job of its
own. `STAGED`, the verdict of those who know nothing, hands no device pointer to MPI.

Where pointers may be given they are not the faster way at every length: an MPI may stage worse than
we do, or an adapter may read a far GPU slower than the host. So the trial times both, and a message
then takes what was the faster at its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hpctrain import stairs
from hpctrain.stairs import Steps

Path = Literal["gdr", "cuda-aware", "ipc", "staged"]
#: The paths on which MPI is given device pointers.
BY_POINTER: tuple[Path, ...] = ("gdr", "cuda-aware")
HOST, POINTER = "staged", "pointer"  #: the two ways that a trial times, in a verdict's `by_size`


Seconds = tuple[tuple[int, float], ...]


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
    #: by class, where pointers may be given: from how many bytes on "staged" or "pointer" is faster
    by_size: Mapping[str, Steps] = field(default_factory=dict)
    #: by class: seconds of messages of some lengths, the faster way: ((bytes, seconds), ...)
    seconds: Mapping[str, Seconds] = field(default_factory=dict)
    #: by class: of copies out of memory that a neighbour maps
    mapped_gb_s: Mapping[str, float] = field(default_factory=dict)


#: What holds without a trial: the host's memory everywhere, neighbours' where handles open.
STAGED = Verdict("ipc", "ipc", "staged", "no trial was made")


def from_table(said: Mapping[str, Any]) -> Verdict:
    """Return the verdict that `asdict` made a table of, and JSON lists of its tuples."""
    lists = {key: _tuples(said[key]) for key in ("by_size", "seconds") if key in said}
    return Verdict(**{**said, **lists})


def _tuples(said: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Any]:
    return {name: tuple(map(tuple, one)) for name, one in said.items()}


def classes(places: Sequence[Place]) -> list[str]:
    """Return the classes of pairs that there are among `places`, which all have GPUs."""
    apart, nodes = len(set(places)), len({place.node for place in places})
    there = {"same_gpu": apart < len(places), "same_node": apart > nodes, "across": nodes > 1}
    return [name for name, some in there.items() if some]


def table(verdict: Verdict, ipc_refused: bool) -> dict[str, str]:
    """Return the path of each class and the reason, as a summary has them."""
    said = {name: getattr(verdict, name) for name in ("same_gpu", "same_node", "across", "reason")}
    if ipc_refused:
        said = {name: "staged" if path == "ipc" else path for name, path in said.items()}
        said["reason"] += "; CUDA IPC was refused between ranks of a node"
    return said


def class_of(here: Place, there: Place) -> str:
    """Return the class of a pair, which is the name of a path in a verdict."""
    if here.node != there.node:
        return "across"
    return "same_gpu" if here.gpu == there.gpu and here.gpu else "same_node"


def path_to(verdict: Verdict, here: Place, there: Place) -> Path:
    """Return the path between `here` and `there`."""
    path: Path = getattr(verdict, class_of(here, there))
    return path


def steps_to(verdict: Verdict, here: Place, there: Place) -> Steps:
    """Return from which lengths on which way is taken between them; nothing: the path's, always."""
    return verdict.by_size.get(class_of(here, there), ())


def by_pointer(path: Path, steps: Steps, nbytes: int) -> bool:
    """Return whether MPI is given pointers for messages of `nbytes`, the same on both sides."""
    return path in BY_POINTER and (not steps or stairs.at(steps, nbytes) == POINTER)
