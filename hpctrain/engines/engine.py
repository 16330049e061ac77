"""The interface of every training regime, and the parts that engines share.

The trainer knows no regime, and an engine knows no recipe, file or progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives import AllReduceFunction, Group, all_gather_bytes
from hpctrain.collectives.recursive_doubling import recursive_doubling
from hpctrain.core.errors import LostRankError
from hpctrain.engines.replay import Recorder
from hpctrain.engines.saved_state import SavedState, pieces_of
from hpctrain.engines.staleness import Staleness
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Batch, Memory, Replica
from hpctrain.nn import Key, Sums
from hpctrain.optim.optimizer import State
from hpctrain.transport.link import Link
from hpctrain.watch.trace import Trace

STEP_BITS = 40  # the low bits of an integer that encodes a failed rank and its step


class Flags(NamedTuple):
    """The flags of a rank at a step boundary; all ranks receive the maxima."""

    stop: int = 0  #: the signal that requests a stop, 0 for none; see hpctrain.core.signals
    #: 1 + the highest rank whose gradient cannot be applied, 0 for none; 1 + the number of ranks
    #: if only the sum over ranks cannot be applied
    failed: int = 0

    def with_failure(self, rank: int) -> Flags:
        """Return these flags with a failure of `rank`, whose gradient cannot be applied."""
        return self._replace(failed=rank + 1)

    def merge(self, other: Flags) -> Flags:
        """Return the larger value of each flag."""
        return Flags(*map(max, self, other))


@dataclass
class Times:
    """Seconds of each activity since the start of training."""

    compute_s: float = 0.0  #: forward, backward and update in the main thread
    wait_s: float = 0.0  #: exposed communication: the main thread waits for messages
    wire_s: float = 0.0  #: communication, of the communication thread if the engine has one
    data_wait_s: float = 0.0  #: the main thread waits for samples, or reads them itself

    @contextmanager
    def compute(self, trace: Trace, name: str) -> Iterator[None]:
        """Record a span of compute without the waits in it, which are added to `wait_s`.

        A layer or an update may wait for other ranks.
        """
        start, wait_s_before = perf_counter(), self.wait_s
        yield
        span = trace.add(name, "compute", start, perf_counter())
        self.compute_s += span - (self.wait_s - wait_s_before)

    @contextmanager
    def wait(
        self, trace: Trace, name: str, *, on_wire: bool = False, **args: Any
    ) -> Iterator[None]:
        """Record a span in which the main thread waits; `on_wire`: it communicates itself."""
        with trace.span(name, "wait", **args) as waiting:
            yield
        self.wait_s += waiting.seconds
        if on_wire:
            self.wire_s += waiting.seconds


class Task(NamedTuple):
    """One worker's part of a step: the gradient of `scale` times the loss of `batch`."""

    batch: Batch
    scale: float
    key: Key


class Work(Protocol):
    """The trainer's side of an engine: it gives tasks to the engine and records the results."""

    #: The consecutive non-finite gradients that a worker may drop where workers train apart.
    max_drops: int

    def task(self, step: int) -> Task:
        """Return this worker's share of batch `step`; steps may be skipped, never repeated."""

    def record(self, step: int, sums: Sums) -> None:
        """Record the results of a task; the run has reached `step`."""

    def flags(self) -> Flags:
        """Return the flags of this rank now; a failure if its last task lacks its samples."""


class Commit:
    """Steps of ranks that each hold a part of the state, or that may be half done."""

    #: The step of the whole state that this rank holds, whenever another rank is lost; None if it
    #: holds a part, or if a step may be half done: then the state is copied between steps.
    step: int | None = None
    shares_sums = False  #: whether all ranks record the same sums, over all workers

    def begin(self) -> None:
        """Begin a step; raise the LostRankError of a rank lost after the last commit."""

    def agree(self, step: int, failed: bool) -> None:
        """Agree with the other ranks that all have the sums of step `step`; collective."""

    def release(self, release: Callable[[], None]) -> None:
        """Call `release`, which waits until all ranks have read the sums."""
        release()

    def pieces(self) -> list[Piece]:
        """Return all pieces of the state of `step`; none without such a step."""
        return []


class AgreedCommit(Commit):
    """Steps of ranks that each hold the whole state, and change it once per step."""

    shares_sums = True

    def __init__(self, link: Link, arena: Arena, state: State):
        """`state`: the optimizer's, of all parameters."""
        self._link, self._arena, self._state = link, arena, state
        self._lost_rank: LostRankError | None = None

    def begin(self) -> None:
        """Raise the LostRankError of a rank lost after the last commit."""
        error, self._lost_rank = self._lost_rank, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames would hold it, and so this engine

    def agree(self, step: int, failed: bool) -> None:
        """Agree on the sums of step `step`; unless it has `failed`, the step is committed."""
        # All ranks that are left have the sums, or none updates.
        self._link.endpoint.survivors.agree()
        if not failed:
            self.step = step + 1

    def release(self, release: Callable[[], None]) -> None:
        """Call `release`; a rank lost meanwhile is reported in the next step."""
        try:
            release()
        except LostRankError as error:
            # The step is committed; others may still read the sums. Frames would hold the engine.
            error.__context__, self._lost_rank = None, error.with_traceback(None)

    def pieces(self) -> list[Piece]:
        """Return all pieces of the state of `step`."""
        return pieces_of(self._arena, self._state, 0, 1)


class Regime(Protocol):
    """The facts of a training regime, and this rank's place in it; most regimes keep the values."""

    name: str
    algorithm: str | None = None  #: the all-reduce of gradients; None without one
    workers: int  #: ranks that compute gradients
    servers: int = 0  #: ranks or threads that keep parameters for workers
    worker: int | None  #: this rank's index among the workers; None for a rank that only serves
    #: each worker takes steps of its own; else all workers share each step
    asynchronous: bool = False
    #: all workers pass the same steps, even if a gradient is not finite or a worker is late
    keeps_step: bool = True
    updates_per_step: float = 1.0  #: calls of the optimizer per step of all workers


class Engine(Regime, Protocol):
    """A rank's part in a training regime."""

    #: the recorder of the order of events; None if the order is fixed
    recorder: Recorder | None = None
    replica: Replica
    times: Times
    #: set on all ranks by `train`; None if no gradient can be stale
    staleness: Staleness | None = None
    check: GradientCheck  #: the check of this rank's gradients
    commit: Commit = Commit()  #: of this rank's steps

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the start."""
        return 0

    def train(self, work: Work, start: int, until: int) -> tuple[int, Flags]:
        """Train from step `start` to `until`; return the step reached and the flags; collective.

        A step is one batch of samples, whichever workers compute it. The flags are the maxima over
        all ranks, the same on each. With `stop` set the step may lie before `until`. With `failed`
        set no rank has applied the gradient of the returned step: the whole state is bit for bit
        as before this step, and training can go on with the next step.
        """

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of a few float64 over all ranks, the same on each."""

    def settle(self) -> None:
        """Put the parameters to evaluate and save into `replica.arena.param`."""

    def memory(self, plane_bytes: int) -> Memory:
        """Return the bytes of this rank's optimizer state, if it is one of the planes.

        They are predicted for planes of `plane_bytes`. Engines that no mesh builds count none.
        """
        return {}

    def state(self) -> list[Piece]:
        """Return this rank's pieces; together the ranks' pieces cover the state once."""

    def load(self, saved: SavedState) -> None:
        """Request this rank's part of the state; it has arrived when all ranks have fetched.

        No communication. Called again with an older checkpoint if `saved` is damaged, so it must
        request, or set, all that it requests or sets with any checkpoint.
        """

    def close(self) -> None:
        """End the threads of this engine and free its links; collective."""


class LockstepEngine(Protocol):
    """An engine whose workers take every step together."""

    def step(self, task: Task, flags: Flags) -> tuple[Sums, Flags]:
        """Train on this rank's share of a step; return its sums and the joint flags."""


def train_in_lockstep(
    engine: LockstepEngine, work: Work, start: int, until: int
) -> tuple[int, Flags]:
    """Train from step `start` to `until`, all workers in each step; see `Engine.train`."""
    flags = Flags()
    for step in range(start, until):
        sums, flags = engine.step(work.task(step), work.flags())
        if flags.failed:
            return step, flags
        work.record(step + 1, sums)
        if flags.stop:
            return step + 1, flags
    return until, flags


def sum_over(group: Group, numbers: np.ndarray) -> np.ndarray:
    """Return the sums of a few float64 over the ranks of `group`, the same on each."""
    total = np.array(numbers, np.float64)
    recursive_doubling(group, total, np.add)
    return total


def sum_in_layer(
    group: Group, times: Times, trace: Trace, numbers: np.ndarray, on_wire: bool = False
) -> np.ndarray:
    """Return the sums over ranks that a layer needs; the time counts as waiting."""
    with times.wait(trace, "sum in a layer", on_wire=on_wire):
        return sum_over(group, numbers)


def average_over(group: Group, allreduce: AllReduceFunction, arrays: Iterable[np.ndarray]) -> None:
    """Replace each of `arrays` by its mean over the ranks of `group`."""
    for x in arrays:
        allreduce(group, x, np.add)
        x /= group.link.size


def gather_rows(link: Link, arena: Arena, rows: np.ndarray) -> np.ndarray:
    """Return the rows of the whole model, of shards of `arena` in the order of ranks."""
    if link.size > 1:
        parts = all_gather_bytes(link, rows.tobytes())
        rows = np.frombuffer(b"".join(parts)).reshape(-1, rows.shape[1])
    return arena.gather_rows(rows)


def join_flags(group: Group, step: int, flags: Flags, failed: bool) -> tuple[int, Flags]:
    """Join step and flags over the ranks: `step`, or the step at which a rank has `failed`."""
    failure_code = ((group.link.rank + 1) << STEP_BITS) + step if failed else 0
    numbers = np.array([flags.stop, failure_code], np.int64)
    recursive_doubling(group, numbers, np.maximum)
    stop, failure_code = numbers.tolist()
    failure, failed_step = divmod(failure_code, 1 << STEP_BITS)
    return (failed_step if failure else step), Flags(stop, failure)
