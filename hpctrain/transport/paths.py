"""The path of GPU memory between two ranks, and the reason: a verdict, made before the run.

    gdr          GPU -> NIC -> wire -> NIC -> GPU           the MPI is given device pointers
    cuda-aware   GPU -> (as MPI chooses) -> GPU             the MPI is given device pointers
    ipc          GPU -> NVLink, PCIe or the same GPU        mapped memory of a node neighbour
    staged       GPU -> host -> wire -> host -> GPU         the MPI is given host memory

A wrong "cuda-aware" is a segfault, so pointers are used only after a successful trial in a job of
its own. `STAGED_VERDICT`, the verdict without a trial, gives MPI no device pointer.

Pointers that work are not faster at every length: an MPI may stage worse than we do, or an adapter
may read a far GPU slower than host memory. So the trial times both, and a message takes the path
that was faster at its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hpctrain.core import thresholds
from hpctrain.core.thresholds import Thresholds

Path = Literal["gdr", "cuda-aware", "ipc", "staged"]
#: The paths on which MPI is given device pointers.
POINTER_PATHS: tuple[Path, ...] = ("gdr", "cuda-aware")
STAGED, POINTER = "staged", "pointer"  #: the two paths that a trial times, in a verdict's `by_size`


MessageTimes = tuple[tuple[int, float], ...]


class RankPlace(NamedTuple):
    """The place of a rank's arrays: the node, and the GPU by a name that all processes share."""

    node: str
    gpu: str = ""  #: its UUID; "" for a rank without a GPU


@dataclass(frozen=True)
class Verdict:
    """The path for each class of pairs, and the reason for the choice."""

    same_gpu: Path
    same_node: Path
    across: Path
    reason: str
    #: by class, if pointers are allowed: the sizes from which "staged" or "pointer" is faster
    by_size: Mapping[str, Thresholds] = field(default_factory=dict)
    #: by class: the time of messages on the faster path: ((bytes, seconds), ...)
    seconds: Mapping[str, MessageTimes] = field(default_factory=dict)
    #: by class: the rate of copies from a neighbour's mapped memory
    mapped_gb_s: Mapping[str, float] = field(default_factory=dict)


#: The verdict without a trial: CUDA IPC inside a node, else staging through the host.
STAGED_VERDICT = Verdict("ipc", "ipc", "staged", "no trial was made")
TRIAL_REMEDY = "run `hpctrain doctor` once, in a job on such nodes"  #: the remedy without a trial


def verdict_from_table(fields: Mapping[str, Any]) -> Verdict:
    """Return the verdict from a table made by `asdict`; JSON has turned its tuples into lists."""
    size_tables = {
        key: {name: tuple(map(tuple, rows)) for name, rows in fields[key].items()}
        for key in ("by_size", "seconds")
        if key in fields
    }
    return Verdict(**{**fields, **size_tables})


def pair_classes(places: Sequence[RankPlace]) -> list[str]:
    """Return the classes of pairs among `places`, where every rank has a GPU."""
    gpus, nodes = len(set(places)), len({place.node for place in places})
    class_exists = {"same_gpu": gpus < len(places), "same_node": gpus > nodes, "across": nodes > 1}
    return [name for name, exists in class_exists.items() if exists]


def summarize_paths(verdict: Verdict, ipc_refused: bool) -> dict[str, str]:
    """Return the path of each class and the reason, for the summary of a run."""
    rows = {name: getattr(verdict, name) for name in ("same_gpu", "same_node", "across", "reason")}
    if ipc_refused:
        rows = {name: "staged" if path == "ipc" else path for name, path in rows.items()}
        rows["reason"] += "; CUDA IPC was refused between ranks of a node"
    return rows


def pair_class(local_place: RankPlace, remote_place: RankPlace) -> str:
    """Return the class of a pair, the name of a field of `Verdict`."""
    if local_place.node != remote_place.node:
        return "across"
    return "same_gpu" if local_place.gpu == remote_place.gpu and local_place.gpu else "same_node"


def path_between(verdict: Verdict, local_place: RankPlace, remote_place: RankPlace) -> Path:
    """Return the path between `local_place` and `remote_place`."""
    path: Path = getattr(verdict, pair_class(local_place, remote_place))
    return path


def thresholds_between(
    verdict: Verdict, local_place: RankPlace, remote_place: RankPlace
) -> Thresholds:
    """Return the size thresholds between two places; (): the verdict's path at every length."""
    return verdict.by_size.get(pair_class(local_place, remote_place), ())


def sends_by_pointer(path: Path, path_thresholds: Thresholds, nbytes: int) -> bool:
    """Return whether MPI is given pointers for messages of `nbytes`, the same on both sides."""
    return path in POINTER_PATHS and (
        not path_thresholds or thresholds.lookup(path_thresholds, nbytes) == POINTER
    )
