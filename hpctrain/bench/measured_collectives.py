"""The collectives under measurement: input and output of each rank, and the factor of busbw.

`bytes` is the length of the longest array of a rank, as in nccl-tests: the input of reduce-scatter,
the output of all-gather. busbw is algbw times a factor, so that with the best algorithm it is the
speed of one rank's link, whatever the number of ranks. The bytes in memory are the least that a
node must read or write: each needed byte once, each changed byte once.

    operation        busbw/algbw    bytes in memory, over n    chunk r is
    allreduce        2(P-1)/P       2P; P+1 if shared
    reduce-scatter   (P-1)/P        P+1                        the result on rank r
    all-gather       (P-1)/P        P                          the input of rank r
    broadcast        1              P

Source of the factors: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain import collectives
from hpctrain.bench import checks
from hpctrain.collectives import Group, Operation
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.direct import direct_shared
from hpctrain.collectives.direct import reduce_scatter as direct_reduce_scatter
from hpctrain.collectives.ring import all_gather, reduce_scatter
from hpctrain.tuning.select import bound

#: f(group, x, op): works in place; returns the array of the result where that is not `x`.
Algorithm = Callable[[Group, np.ndarray, Operation], Any]
#: f(group, x, op) that returns a call without arguments; all ranks must call f.
Binder = Callable[[Group, np.ndarray, Operation], Callable[[], Any]]
NATIVE = "native"  #: the MPI library's own, called with nothing around it
NATIVE_PLAIN = "native-plain"  #: the same through mpi4py's detection of the array's type


class Case(NamedTuple):
    """One call: on `rank` of `ranks`, with `length` elements of `dtype`, reduced by `op`."""

    rank: int
    ranks: int
    length: int
    dtype: np.dtype
    op: str

    @property
    def edges(self) -> list[int]:
        """Where chunks begin, and the last one ends."""
        return bounds(self.length, self.ranks)


class Part(NamedTuple):
    """Expected elements `start` .. of a vector: a block of `checks`, within a margin."""

    start: int
    stop: int
    expected: np.ndarray
    margin: np.ndarray


@dataclass(frozen=True)
class Collective:
    """An operation, its algorithms and the checks of its result."""

    name: str
    algorithms: Mapping[str, Algorithm]
    input: Callable[[Case], slice]  #: which elements a rank has before
    output: Callable[[Case], list[Part]]  #: and what its result is made of
    busbw: Callable[[int], float]  #: ranks -> busbw / algbw
    traffic: Callable[[int], int]  #: ranks of a node -> bytes in its memory / bytes
    shared_traffic: Callable[[int], int] | None = None  #: where the result is one for all
    public_calls: Mapping[str, bool] = field(
        default_factory=dict
    )  #: `ht.*`, with or without `check`
    bound: Mapping[str, Binder] = field(default_factory=dict)  #: calls that are made once
    plain: bool = False  #: whether NATIVE_PLAIN is to be had
    equal_chunks: bool = False  #: whether the number of ranks divides the length

    @property
    def names(self) -> tuple[str, ...]:
        """The names of algorithms that a user may choose."""
        natives = (NATIVE, NATIVE_PLAIN) if self.plain else (NATIVE,)
        return tuple(dict.fromkeys((*self.public_calls, *self.algorithms, *self.bound, *natives)))

    def length(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Return the elements of a vector of about `nbytes`, at least one."""
        step = ranks if self.equal_chunks else 1
        return -(-max(1, nbytes // itemsize) // step) * step

    def prepare(self, x: np.ndarray, case: Case) -> None:
        """Fill flat `x` with the input of this rank."""
        x[:] = 0
        own = self.input(case)
        checks.fill_pattern(x[own], checks.block(case.rank, case.dtype), own.start)

    def is_correct(self, result: np.ndarray, case: Case) -> bool:
        """Return whether `result` is right on this rank."""
        parts = self.output(case)
        first = parts[0].start
        return result.size == parts[-1].stop - first and all(
            checks.agrees(result[a - first : b - first], expected, margin, a)
            for a, b, expected, margin in parts
        )


def _whole_vector(case: Case) -> slice:
    return slice(0, case.length)


def _own_chunk(case: Case) -> slice:
    return slice(*case.edges[case.rank : case.rank + 2])


def _root_vector(case: Case) -> slice:
    return slice(0, case.length if case.rank == 0 else 0)


def _reduced(case: Case, span: slice) -> list[Part]:
    return [Part(span.start, span.stop, *checks.reduced(case.op, case.ranks, case.dtype))]


def _copy_of(case: Case, rank: int, span: slice) -> Part:
    values = checks.to_float64(checks.block(rank, case.dtype))
    return Part(span.start, span.stop, values, np.zeros(checks.PERIOD))


def _chunks_of_ranks(case: Case) -> list[Part]:
    ranks = range(case.ranks)
    return [_copy_of(case, rank, _own_chunk(case._replace(rank=rank))) for rank in ranks]


def _ring_all_gather(group: Group, x: np.ndarray, op: Operation) -> None:
    all_gather(group, x)


def _direct_reduce_scatter(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Reduce our chunk; nobody may change its array before all have read it."""
    own = direct_reduce_scatter(group, x, op, bounds(x.size, group.link.size))
    if group.node_buffers is not None:
        group.node_buffers.flags.exchange()
    return own


def _tree_broadcast(group: Group, x: np.ndarray, op: Operation) -> None:
    collectives.broadcast(group, x)


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "allreduce",
            {**collectives.ALLREDUCE, "direct-shared": direct_shared},
            input=_whole_vector,
            output=lambda case: _reduced(case, _whole_vector(case)),
            busbw=lambda ranks: 2 * (ranks - 1) / ranks,
            traffic=lambda ranks: 2 * ranks,
            shared_traffic=lambda ranks: ranks + 1,
            public_calls={"auto": True, "auto-unchecked": False},
            bound={"auto-bound": bound, "direct-bound": partial(bound, name="direct")},
            plain=True,
        ),
        Collective(
            "reduce-scatter",
            {"ring": reduce_scatter, "direct": _direct_reduce_scatter},
            input=_whole_vector,
            output=lambda case: _reduced(case, _own_chunk(case)),
            busbw=lambda ranks: (ranks - 1) / ranks,
            traffic=lambda ranks: ranks + 1,
            equal_chunks=True,
        ),
        Collective(
            "all-gather",
            {"ring": _ring_all_gather},
            input=_own_chunk,
            output=_chunks_of_ranks,
            busbw=lambda ranks: (ranks - 1) / ranks,
            traffic=lambda ranks: ranks,
            equal_chunks=True,
        ),
        Collective(
            "broadcast",
            {"tree": _tree_broadcast},
            input=_root_vector,
            output=lambda case: [_copy_of(case, 0, _whole_vector(case))],
            busbw=lambda ranks: 1.0,
            traffic=lambda ranks: ranks,
        ),
    )
}
