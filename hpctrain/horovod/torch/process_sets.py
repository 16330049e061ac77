"""Process sets: groups of ranks with operations of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.named.engine import Engine
from hpctrain.horovod.torch.named.requests import SET, Request


class ProcessSet:
    """Ranks that run operations together, given as a list or as a communicator of mpi4py.

    It can be used once it was given to `init` or to `add_process_set`.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any):
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if isinstance(ranks_or_comm, Iterable):
            self.ranks = sorted(ranks_or_comm)
            if any(not isinstance(rank, int) for rank in self.ranks):
                raise ValueError(f"ProcessSet: expected numbers of ranks, seen {self.ranks}")
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        else:
            raise ValueError(
                "ProcessSet: expected a list of ranks or a communicator of mpi4py, seen "
                f"{type(ranks_or_comm).__name__}"
            )

    def size(self) -> int | None:
        """Return the number of ranks; None before the set is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the rank of this process in the set, -1 outside; None before it is registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return self.ranks.index(job.rank()) if self.included() else -1

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while its ranks are unknown."""
        return None if self.ranks is None else job.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet({self.ranks}, process_set_id={self.process_set_id})"


#: all ranks
global_process_set = ProcessSet([])

_next_id = 1
_sets: list[ProcessSet] = []


def set_up(process_sets: Sequence[ProcessSet]) -> None:
    """Register the set of all ranks, and `process_sets`; collective."""
    global_process_set.ranks = list(range(job.size()))
    global_process_set.process_set_id = 0
    for process_set in process_sets:
        add_process_set(process_set)


def forget() -> bool:
    """Let no process set be registered any more; return whether one was, but the global one."""
    global _next_id
    had_sets = bool(_sets)
    for process_set in (*_sets, global_process_set):
        process_set.process_set_id = None
    _sets.clear()
    _next_id = 1
    return had_sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks and return it; all ranks must call, with the same set.

    Raises ValueError if a set of the same ranks is registered, HorovodInternalError if ranks give
    other sets.
    """
    global _next_id
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    world = job.state().world
    if process_set.ranks is None:
        process_set.ranks = sorted(process_set.mpi_comm.allgather(job.rank()))
    ranks = process_set.ranks
    if not ranks or sorted({*ranks}) != ranks or not 0 <= ranks[0] <= ranks[-1] < world.size:
        raise ValueError(f"expected different ranks of 0 to {world.size - 1}, seen {ranks}")
    if any(ranks == known.ranks for known in (*_sets, global_process_set)):
        raise ValueError(f"a process set of the ranks {ranks} is registered already")
    _agree("add", ranks)
    process_set.process_set_id, _next_id = _next_id, _next_id + 1
    if world.rank in ranks:
        job.add_engine(process_set.process_set_id, ranks)
    _sets.append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Let `process_set` be used no more; return whether it was registered. All ranks must call."""
    if process_set not in _sets:
        return False
    assert process_set.ranks is not None and process_set.process_set_id is not None
    _agree("remove", process_set.ranks)
    _sets.remove(process_set)
    job.remove_engine(process_set.process_set_id)
    process_set.process_set_id = None
    return True


def engine_of(process_set: ProcessSet) -> Engine:
    """Return the engine of a registered set with this rank in it; else raise ValueError."""
    engines = job.state().engines
    if (engine := engines.get(process_set.process_set_id)) is not None:  # type: ignore[arg-type]
        return engine
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered: call hvd.add_process_set first")
    raise ValueError(f"rank {job.rank()} is not in {process_set}")


def _agree(verb: str, ranks: Sequence[int]) -> None:
    """Return once all ranks have called to add or remove the set of `ranks`."""
    request = Request(f"{verb} a process set", SET, shapes=(tuple(ranks),))
    job.state().engines[0].run(request)
