"""The ranks of a job under Horovod's names, and what was built in."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpctrain.horovod.torch.named.engine import Engine
from hpctrain.horovod.torch.named.settings import Settings
from hpctrain.torch.job import end_after_loss
from hpctrain.world import World

_MAX_TAG = 32_000
#: Why a script ends after a loss, and what to do.
ENDS_AFTER_LOSS = (
    "this script cannot go on without it; a function under hvd.elastic.run goes on with the ranks "
    "that are left, if hvd.init() had no comm"
)


@dataclass
class State:
    """What lives from `init` to `shutdown`."""

    world: World
    settings: Settings
    engines: dict[int, Engine] = field(default_factory=dict)  #: by the id of their process set
    process: int = field(default_factory=os.getpid)
    is_elastic: bool = False  #: whether this rank would go on after a loss of other ranks


_state: State | None = None
#: what `end` has closed: the next job of the same ranks gives back its links
_closed: list[Engine] = []
#: called after a loss of ranks
_renewals: list[weakref.WeakMethod[Callable[[], Any]]] = []


def can_free(world: World) -> bool:
    """Return whether the ranks of `world` can give back the links of their last job."""
    return all(engine.is_intact for engine in _closed_by(world))


def _closed_by(world: World) -> list[Engine]:
    main = world.main
    return [x for x in _closed if (parent := x.world.parent) and parent.main is main]


def begin(world: World, settings: Settings, *, frees: bool) -> None:
    """Let the ranks of `world` be the job, with an engine for all of them; collective.

    `frees`: whether all ranks can give back the links of their last job.
    """
    global _state
    closed = _closed_by(world)
    _closed[:] = [engine for engine in _closed if engine not in closed]
    for engine in closed if frees else ():
        engine.free()
    _state = State(world, settings)
    add_engine(0, range(world.size))


def end() -> None:
    """Let operations under way fail, on all ranks, and have no job."""
    global _state
    if _state is not None:
        _closed.extend(_state.engines.values())
        close_engines(tells=True)
    _state = None


def is_initialized() -> bool:
    """Return whether operations can be called."""
    return _state is not None


def state() -> State:
    """Return the state; raise ValueError before `init`."""
    if _state is None:
        raise ValueError("hpctrain.horovod has not been initialized; use hvd.init().")
    return _state


def add_engine(number: int, ranks: Sequence[int]) -> None:
    """Make the engine of process set `number`; collective over `ranks`."""
    present = state()
    tag = 2 * number % _MAX_TAG
    engine = Engine(present.world, ranks, tag, present.settings, _end_unless_elastic)
    present.engines[number] = engine


def remove_engine(number: int) -> None:
    """End the engine of a process set, if this rank has it; collective over the set."""
    if (engine := state().engines.pop(number, None)) is not None:
        engine.close()
        engine.free()


def _end_unless_elastic() -> None:
    if _state is not None and not _state.is_elastic:
        end_after_loss(_state.world, ENDS_AFTER_LOSS)


def has_lost() -> bool:
    """Return whether operations fail since a rank was lost."""
    return any(engine.has_lost for engine in state().engines.values())


def call_after_loss(renew: Callable[[], Any]) -> None:
    """Let the method `renew` of an object that holds state of the ranks be called after a loss.

    Every rank calls the methods in the order in which they were given, while the objects live.
    """
    living = [reference for reference in _renewals if reference() is not None]
    _renewals[:] = [*living, weakref.WeakMethod(renew)]


def renew() -> None:
    """Call the methods given to `call_after_loss`; collective over the ranks that are left."""
    for reference in _renewals:
        if (method := reference()) is not None:
            method()


def close_engines(*, tells: bool = False) -> None:
    """End the engine of each process set; `tells` the other ranks, see `Engine.close`."""
    engines = state().engines
    for engine in engines.values():
        engine.close(tells=tells)
    engines.clear()


def rank() -> int:
    """Return the number of this rank."""
    return state().world.rank


def size() -> int:
    """Return the number of ranks."""
    return state().world.size


def local_rank() -> int:
    """Return the number of this rank on its node."""
    return state().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return state().world.node.size


def cross_rank() -> int:
    """Return the number of this rank among the ranks with the same local rank."""
    return state().world.across.rank


def cross_size() -> int:
    """Return the number of ranks with the same local rank."""
    return state().world.across.size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    return len({len(node) for node in state().world.main.nodes}) == 1


def mpi_threads_supported() -> bool:
    """Return whether MPI grants MPI_THREAD_MULTIPLE."""
    return state().world.concurrent


def mpi_enabled() -> bool:
    """Return True: operations run on MPI."""
    return True


mpi_built = mpi_enabled


def gloo_enabled() -> bool:
    """Return False: there is no Gloo here."""
    return False


gloo_built = ccl_built = ddl_built = gloo_enabled


def nccl_built() -> int:
    """Return 0: NCCL is not used for operations of this module."""
    return 0


def cuda_built() -> bool:
    """Return whether PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether PyTorch was built with ROCm."""
    return torch.version.hip is not None
