"""The measured collectives: input and output of each rank, and the factor from algbw to busbw.

`bytes` is the length of a rank's longest array, as in nccl-tests: the input of reduce-scatter,
the output of all-gather. busbw is algbw times a factor. With the best algorithm, busbw equals the
bandwidth of a rank's link for any number of ranks. The bytes in memory are the minimum that a
node must read or write: each needed byte once, each changed byte once.

    operation        busbw/algbw    bytes in memory, over n    chunk r is
    allreduce        2(P-1)/P       2P; P+1 if shared
    reduce-scatter   (P-1)/P        P+1                        the result on rank r
    all-gather       (P-1)/P        P                          the input of rank r
    broadcast        1              P

Source of the factors: nccl-tests, doc/PERFORMANCE.md.

Test data are random, and their reduction is known at any length; float64 is the reference for
floats. Each rank repeats a block of random values up to the length of its vector. The block length
is a prime, so the check detects a misplaced chunk. No rank needs the vectors of the others.

    rank 0   [ a a' a'' ... ][ a a' a'' ... ][ a a'       the sum of the blocks, in float64, is
    rank 1   [ b b' b'' ... ][ b b' b'' ... ][ b b'       the block of the sum
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain import collectives
from hpctrain.collectives import Group, Operation, operation
from hpctrain.collectives.chunks import bounds
from hpctrain.collectives.direct import direct, direct_shared
from hpctrain.collectives.direct import reduce_scatter as direct_reduce_scatter
from hpctrain.collectives.reductions.operations import ufunc_of
from hpctrain.collectives.ring import all_gather, reduce_scatter
from hpctrain.tuning.select import bind, choose_algorithm

#: f(group, x, op) works in place, or returns the array of the result.
Algorithm = Callable[[Group, np.ndarray, Operation], Any]
#: f(group, x, op) returns a bound call; all ranks must call f.
Binder = Callable[[Group, np.ndarray, Operation], Callable[[], Any]]
NATIVE = "native"  #: the MPI library's collective as a bound call
#: The same through mpi4py, which detects the array's type in each call.
NATIVE_UNBOUND = "native-plain"
BLOCK_LENGTH = 65_537  # a prime: chunks do not begin at multiples of it
BFLOAT16_EPS = 2.0**-7  # absent from NumPy's finfo


class CollectiveCall(NamedTuple):
    """A rank's call: `length` elements of `dtype`, reduced by `op` over `ranks` ranks."""

    rank: int
    ranks: int
    length: int
    dtype: np.dtype
    op: str

    @property
    def chunk_bounds(self) -> list[int]:
        """The first element of each chunk, then the end of the last one."""
        return bounds(self.length, self.ranks)


class ExpectedRange(NamedTuple):
    """Expected elements `start` to `stop` of a vector: a repeated block and its error margin."""

    start: int
    stop: int
    expected: np.ndarray
    margin: np.ndarray


@dataclass(frozen=True)
class Collective:
    """A collective operation: its algorithms, its costs and the expected results."""

    name: str
    algorithms: Mapping[str, Algorithm]
    input: Callable[[CollectiveCall], slice]  #: elements that a rank contributes
    output: Callable[[CollectiveCall], list[ExpectedRange]]  #: parts of a rank's result
    busbw: Callable[[int], float]  #: ranks -> busbw / algbw
    traffic: Callable[[int], int]  #: ranks of a node -> bytes in its memory / bytes
    shared_traffic: Callable[[int], int] | None = None  #: if ranks share one result
    public_calls: Mapping[str, bool] = field(
        default_factory=dict
    )  #: `ht.*`, with or without `check`
    binders: Mapping[str, Binder] = field(default_factory=dict)  #: bound calls, made once per array
    has_native_unbound: bool = False  #: whether NATIVE_UNBOUND is available
    equal_chunks: bool = False  #: whether the length must be divisible by the number of ranks

    @property
    def names(self) -> tuple[str, ...]:
        """The algorithms that a user may choose."""
        natives = (NATIVE, NATIVE_UNBOUND) if self.has_native_unbound else (NATIVE,)
        return tuple(dict.fromkeys((*self.public_calls, *self.algorithms, *self.binders, *natives)))

    def length(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Return the number of elements of a vector of about `nbytes`, at least one."""
        multiple = ranks if self.equal_chunks else 1
        return -(-max(1, nbytes // itemsize) // multiple) * multiple

    def prepare(self, x: np.ndarray, case: CollectiveCall) -> None:
        """Fill flat `x` with the input of this rank."""
        x[:] = 0
        own_slice = self.input(case)
        fill_with_block(x[own_slice], random_block(case.rank, case.dtype), own_slice.start)

    def is_correct(self, result: np.ndarray, case: CollectiveCall) -> bool:
        """Return whether `result` is right on this rank."""
        expected_ranges = self.output(case)
        first_element = expected_ranges[0].start
        return result.size == expected_ranges[-1].stop - first_element and all(
            is_close(result[start - first_element : stop - first_element], expected, margin, start)
            for start, stop, expected, margin in expected_ranges
        )


def _vector_slice(case: CollectiveCall) -> slice:
    return slice(0, case.length)


def _chunk_slice(case: CollectiveCall) -> slice:
    return slice(*case.chunk_bounds[case.rank : case.rank + 2])


def _expected_reduction(case: CollectiveCall, elements: slice) -> list[ExpectedRange]:
    return [
        ExpectedRange(
            elements.start,
            elements.stop,
            *expected_reduction(case.op, case.ranks, case.dtype),
        )
    ]


def _expected_copy(case: CollectiveCall, rank: int, elements: slice) -> ExpectedRange:
    values = widen(random_block(rank, case.dtype))
    return ExpectedRange(elements.start, elements.stop, values, np.zeros(BLOCK_LENGTH))


def _expected_chunks(case: CollectiveCall) -> list[ExpectedRange]:
    ranks = range(case.ranks)
    return [_expected_copy(case, rank, _chunk_slice(case._replace(rank=rank))) for rank in ranks]


def _direct_reduce_scatter(group: Group, x: np.ndarray, op: Operation) -> np.ndarray:
    """Reduce our chunk, then wait until the neighbours have read our array."""
    own_slice = direct_reduce_scatter(group, x, op, bounds(x.size, group.link.size))
    if group.node_buffers is not None:
        group.node_buffers.flags.exchange()
    return own_slice


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective(
            "allreduce",
            {**collectives.ALLREDUCE, "direct-shared": direct_shared},
            input=_vector_slice,
            output=lambda case: _expected_reduction(case, _vector_slice(case)),
            busbw=lambda ranks: 2 * (ranks - 1) / ranks,
            traffic=lambda ranks: 2 * ranks,
            shared_traffic=lambda ranks: ranks + 1,
            public_calls={"auto": True, "auto-unchecked": False},
            binders={
                "auto-bound": lambda group, x, op: bind(
                    group, x, op, choose_algorithm(group, x, op)
                ),
                "direct-bound": partial(bind, allreduce=direct),
            },
            has_native_unbound=True,
        ),
        Collective(
            "reduce-scatter",
            {"ring": reduce_scatter, "direct": _direct_reduce_scatter},
            input=_vector_slice,
            output=lambda case: _expected_reduction(case, _chunk_slice(case)),
            busbw=lambda ranks: (ranks - 1) / ranks,
            traffic=lambda ranks: ranks + 1,
            equal_chunks=True,
        ),
        Collective(
            "all-gather",
            {"ring": lambda group, x, op: all_gather(group, x)},
            input=_chunk_slice,
            output=_expected_chunks,
            busbw=lambda ranks: (ranks - 1) / ranks,
            traffic=lambda ranks: ranks,
            equal_chunks=True,
        ),
        Collective(
            "broadcast",
            {"tree": lambda group, x, op: collectives.broadcast(group, x)},
            input=lambda case: slice(0, case.length if case.rank == 0 else 0),
            output=lambda case: [_expected_copy(case, 0, _vector_slice(case))],
            busbw=lambda ranks: 1.0,
            traffic=lambda ranks: ranks,
        ),
    )
}


def random_block(rank: int, dtype: np.dtype) -> np.ndarray:
    """Return the block of `rank`: BLOCK_LENGTH random values of `dtype`."""
    rng = np.random.default_rng((rank, 2026))
    if dtype.kind in "biu":
        return rng.integers(-1000, 1000, BLOCK_LENGTH).astype(dtype)
    components = rng.standard_normal((2, BLOCK_LENGTH))
    return (components[0] + 1j * components[1] if dtype.kind == "c" else components[0]).astype(
        dtype
    )


def widen(values: np.ndarray) -> np.ndarray:
    """Convert `values` to the dtype of comparisons: int64, float64 or complex128."""
    if values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def fill_with_block(x: np.ndarray, values: np.ndarray, start: int = 0) -> None:
    """Repeat block `values` in flat `x`, which begins at element `start` of the vector."""
    for array_slice, block_slice in _block_slices(start, x.size):
        x[array_slice] = values[block_slice]


def is_close(x: np.ndarray, expected: np.ndarray, margin: np.ndarray, start: int = 0) -> bool:
    """Return whether `x` lies within `margin` of `expected`; both are blocks from `widen`."""
    return all(
        bool(np.all(np.abs(widen(x[array_slice]) - expected[block_slice]) <= margin[block_slice]))
        for array_slice, block_slice in _block_slices(start, x.size)
    )


def expected_reduction(op: str, ranks: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the block of the reduction over `ranks`, and the error margin of each element.

    In a sum of P values, in any order, each value is rounded at most P - 1 times. The error is at
    most (P - 1) u sum|v| (Higham 2002, section 4.2); we use the full spacing for u as slack. The
    same holds for a product, with up to sqrt(5) u per complex factor (Brent et al., 2007).
    """
    values = [widen(random_block(rank, dtype)) for rank in range(ranks)]
    ufunc = ufunc_of(operation(op, dtype))
    expected = ufunc.reduce(values)
    if dtype.kind in "biu":  # integer overflow wraps around
        return widen(expected.astype(dtype)), np.zeros(BLOCK_LENGTH)
    if op in ("min", "max"):
        return expected, np.zeros(BLOCK_LENGTH)
    factor = np.sqrt(5) if op == "prod" and dtype.kind == "c" else 1.0
    return expected, factor * ranks * eps(dtype) * ufunc.reduce(np.abs(values))


def eps(dtype: np.dtype) -> float:
    """Return the machine epsilon of `dtype`: the spacing of floats at 1."""
    return BFLOAT16_EPS if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _block_slices(start: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Yield (slice of the array, slice of the block) pairs that cover `length` elements."""
    offset = 0
    while offset < length:
        block_offset = (start + offset) % BLOCK_LENGTH
        length_in_block = min(BLOCK_LENGTH - block_offset, length - offset)
        yield (
            slice(offset, offset + length_in_block),
            slice(block_offset, block_offset + length_in_block),
        )
        offset += length_in_block
