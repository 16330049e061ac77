"""The interface of every training regime: training steps, and one consistent state.

The trainer knows no regime, and an engine knows no recipe, file or progress bar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import Group
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy
from hpctrain.engines.replay import Recorder
from hpctrain.engines.staleness import Staleness
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Batch, Replica
from hpctrain.nn import Key, Sums

#: Shards of the arena are cut at multiples of this, so that partial sums do not depend on P.
BLOCK = 65_536
STEP_BITS = 40  # of a number that holds a rank and a step


class Flags(NamedTuple):
    """The flags of a rank at a step boundary; all ranks receive the maximum of each."""

    stop: int = 0  #: a rank was asked to stop: the number of the signal, see hpctrain.core.signals
    #: one more than the highest rank whose gradient cannot be taken, 0 for none; where it is the
    #: sum of all, the number of ranks stands for a rank
    failed: int = 0

    def failing(self, rank: int) -> Flags:
        """Return the flags of `rank`, whose gradient cannot be taken."""
        return self._replace(failed=rank + 1)

    def joined(self, other: Flags) -> Flags:
        """Return the larger value of each flag."""
        return Flags(*map(max, self, other))


@dataclass
class Times:
    """Seconds since the start of training."""

    compute_s: float = 0.0  #: main thread in forward, backward, update
    wait_s: float = 0.0  #: main thread waiting for the wire: exposed communication
    wire_s: float = 0.0  #: in collectives, of the communication thread where there is one


class Task(NamedTuple):
    """The work of one worker in one step: the gradient of `scale` times the loss of `batch`."""

    batch: Batch
    scale: float
    key: Key


class Work(Protocol):
    """The trainer as an engine sees it: it gives tasks and receives their results."""

    #: Gradients that a worker with steps of its own may drop in a row, since they are not finite.
    may_drop: int

    def task(self, step: int) -> Task:
        """Return this worker's share of batch `step`; steps may be left out, never repeated."""

    def done(self, step: int, sums: Sums) -> None:
        """Count a task that is done; the run has come to `step`."""

    def flags(self) -> Flags:
        """Return the flags of this rank now."""


class Engine(Protocol):
    """One rank's part in a training regime."""

    name: str
    algorithm: str | None  #: how gradients are summed, where they are
    workers: int  #: ranks that compute gradients
    servers: int  #: ranks, or threads in them, that keep parameters for workers
    worker: int | None  #: which worker this rank is; None where it only serves
    asynchronous: bool  #: a step of one worker counts by itself; else all workers share each step
    updates_per_step: float  #: how often the optimizer is called while all workers do a step
    recorder: Recorder | None  #: of what happened, where the order of events matters
    replica: Replica
    times: Times
    bytes_sent: int
    staleness: Staleness | None  #: known to all ranks after `train`; None where nothing is stale
    check: GradientCheck  #: of this rank's gradients

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`, all ranks; return the step reached and the flags.

        A step is a batch of samples, whoever computed them. The flags are joined over all ranks
        and the same on each. With `stop` set the step may lie before `until`. With `failed` set
        no rank has taken the gradient of the step returned: parameters, the optimizer's state and
        all else are as before it, bit for bit, and training can go on with the step behind it.
        """

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""

    def settle(self) -> None:
        """Bring the parameters that are evaluated and saved into `replica.arena.param`."""

    def state(self) -> list[Piece]:
        """Return this rank's pieces of the state; all ranks' pieces together are all of it."""

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the whole state, given as full flat arrays by name."""

    def close(self) -> None:
        """End the threads of this engine and free its links; collective."""


class SteppingEngine(Protocol):
    """An engine whose workers take every step together."""

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Train on this rank's share of a step; join the `flags` of all ranks on the way."""


def in_step(engine: SteppingEngine, work: Work, start: int, until: int) -> tuple[int, Flags]:
    """Train from step `start` to `until`, all workers in each step; see `Engine.train`."""
    flags = Flags()
    for step in range(start, until):
        sums, flags = engine.step(work.task(step), work.flags())
        if flags.failed:
            return step, flags
        work.done(step + 1, sums)
        if flags.stop:
            return step + 1, flags
    return until, flags


def ignore_ready(name: str) -> None:
    """Do nothing: gradients are sent after backward."""


def join(group: Group, step: int, flags: Flags, failed: bool) -> tuple[int, Flags]:
    """Return (step, flags) of all ranks: `step`, or the one at which a rank has `failed`."""
    code = ((group.link.rank + 1) << STEP_BITS) + step if failed else 0
    numbers = np.array([flags.stop, code], np.int64)
    recursive_doubling(group, numbers, np.maximum)
    stop, code = numbers.tolist()
    failure, at = divmod(code, 1 << STEP_BITS)
    return (at if failure else step), Flags(stop, failure)


def whole(partials: np.ndarray) -> np.ndarray:
    """Return `partials`: the identity, for one rank that holds the whole arena."""
    return partials


def pieces_of(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], rank: int, size: int
) -> list[Piece]:
    """Return rank's 1/P of a state that every rank holds in full; so all ranks write."""
    return [piece_of(name, x, rank, size) for name, x in _flat(arena, optimizer_state).items()]


def load_into(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]
) -> None:
    """Copy the full `arrays` of a checkpoint into arena and optimizer state.

    Raises UsageError if they are those of another model or optimizer.
    """
    for name, x in _flat(arena, optimizer_state).items():
        copy(x, fitting(arrays, name, x.size))


def fitting(arrays: Mapping[str, np.ndarray], name: str, size: int) -> np.ndarray:
    """Return array `name` of a checkpoint; raise UsageError unless it has `size` elements."""
    actual = arrays[name].size if name in arrays else "none"
    if actual != size:
        raise UsageError(
            f"the checkpoint does not fit the recipe: expected {size} numbers of '{name}', "
            f"seen {actual}; resume with the model and the optimizer that it was made with"
        )
    return arrays[name]


def _flat(arena: Arena, optimizer_state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    buffer = {"buffer": arena.buffer} if arena.buffer.size else {}
    return {
        "param": arena.param,
        **buffer,
        **{f"optimizer.{k}": x for k, x in optimizer_state.items()},
    }


def piece_of(name: str, x: np.ndarray, rank: int, size: int) -> Piece:
    """Return rank's 1/P of flat array `x`, which every rank holds in full."""
    offsets: Sequence[int] = bounds(x.size, size, BLOCK)
    start, stop = offsets[rank], offsets[rank + 1]
    return Piece(name, start, x.size, x[start:stop])
