"""Odd arrays through every algorithm, operation and dtype: right values, the same on all ranks.

Bytes are compared over ranks, and between algorithms where the operation is exact. Lengths, shapes
and places in memory are gone through in each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

import numpy as np
import odd_arrays
import pytest
from cases import dtype_of
from ranks import on_ranks

from hpctrain.collectives import ALLREDUCE, DTYPES, all_gather_bytes
from hpctrain.collectives.reductions.operations import operation_names
from hpctrain.transport.paths import RankPlace
from hpctrain.world import World
from hpctrain.world.calls import calls

EVERY = ("auto", *(name for name in ALLREDUCE if name != "null"))
SHIFTS = (0, 1, 2, 3)  # the columns at which an array of one element begins


@pytest.fixture(scope="module")
def checks(request):
    """Count results that were compared, and say how many in the end."""
    counted: list[int] = []
    yield counted
    if counted and not request.session.testsfailed:
        with request.config.pluginmanager.get_plugin(
            "capturemanager"
        ).global_and_fixture_disabled():
            print(f"\nodd arrays: {sum(counted)} checks, 0 differences")


@pytest.fixture
def step(request):
    """Return how many forms an operation goes on by: all are for --full."""
    return 1 if request.config.getoption("--full") else 3


class Form(NamedTuple):
    """An array: its shape, where its columns begin, and how it lies in memory."""

    shape: tuple[int, ...]
    shift: int = 0
    offset: int = 0  #: elements of its memory before it
    in_node_memory: bool = False


def every_form(ranks: int) -> Iterator[Form]:
    """Yield arrays of odd lengths and shapes."""
    yield Form((), 3)
    yield Form((0, 3))
    for shift in SHIFTS:
        yield Form((1,), shift, offset=shift % 2, in_node_memory=shift > 1)
    for shift, n in enumerate((ranks - 1, ranks, ranks + 1)):
        yield Form((n,), 3 * shift, offset=1)
    yield Form((101,), offset=1)
    yield Form((3, 7), 5)
    yield Form((5003,), 1, in_node_memory=True)
    yield Form((5003,), 2, offset=3)


def placed(memory: dict[bool, np.ndarray], values: np.ndarray, form: Form) -> np.ndarray:
    """Return a copy of `values` as `form` has it, in node memory or the rank's own."""
    start = form.offset * values.itemsize
    part = memory[form.in_node_memory][start : start + values.nbytes]
    x = part.view(values.dtype).reshape(form.shape)
    x[...] = values.reshape(form.shape)
    return x


def must_be_right(world: World, name: str, dtype: str, step: int) -> int:
    """Reduce forms by all operations of `dtype`; return how many results were compared.

    Of the forms each operation has every `step`-th, from another one on.
    """
    forms, begin = list(every_form(world.size)), EVERY.index(name) + DTYPES.index(dtype)
    longest = 5010 * dtype_of(dtype).itemsize
    memory = {True: world.memory.zeros(longest, np.uint8), False: np.zeros(longest, np.uint8)}
    by_mpi = name == "native" and world.transport == "mpi"
    faults, digests = [], []
    for number, op in enumerate(operation_names(dtype_of(dtype))):
        if by_mpi and "16" in dtype and dtype != "int16" and op in LACKING:
            continue
        for form in forms[(begin + number) % step :: step]:
            case = odd_arrays.Case(world.size, int(np.prod(form.shape)), dtype, op, form.shift)
            if form.in_node_memory:
                world.link.barrier()  # nobody writes what others still read
            x = placed(memory, odd_arrays.rows(case)[world.rank], form)
            with np.errstate(all="ignore"):
                calls.allreduce(x, op, name, world, check=False)
                faults += [(op, form, i) for i in odd_arrays.wrong(x.reshape(-1), case)[:3]]
            one_result = case.exact or not by_mpi
            # `auto` may take MPI's own, whose sums of NaNs have any payload on any rank.
            x = with_one_nan(x) if name == "auto" and op in LACKING else x
            digests.append((op, form, crc32(x.tobytes()) if one_result else 0))
    reported = all_gather_bytes(
        world.link, np.array([item[2] for item in digests], np.int64).tobytes()
    )
    first, own = (np.frombuffer(item, np.int64) for item in (reported[0], reported[world.rank]))
    faults += [(*digests[i][:2], "unlike rank 0") for i in np.flatnonzero(first != own)]
    assert not faults, faults[:10]  # pytest takes minutes to compare long lists
    return len(digests)


def with_one_nan(x: np.ndarray) -> np.ndarray:
    """Return `x`, every NaN with the same bits."""
    parts = x.reshape(-1).view(f"f{x.itemsize // 2}") if x.dtype.kind == "c" else x
    return np.where(parts == parts, parts, np.array(np.nan, np.float32).astype(parts.dtype))


LACKING = ("sum", "prod", "mean")  # of 16-bit floats in MPI


@pytest.mark.sample(5)
@on_ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_all_reduce(ranks, name, nodes, dtype, step, checks):
    def body(plain):
        if nodes == 1 or name == "direct" or plain.size == 1:
            return must_be_right(plain, name, dtype, step)
        world = over_two_nodes(plain)
        counted = must_be_right(world, name, dtype, step)
        for link in (world.node, world.across):
            link.endpoint.free()
        return counted

    checks += ranks(body)


def on_root(x: np.ndarray, op: str, world: World) -> np.ndarray | None:
    calls.reduce(x, op, world.size - 1, world, check=False)
    return x if world.rank == world.size - 1 else None


def bound(x: np.ndarray, op: str, world: World) -> np.ndarray | None:
    """Reduce by a bound call; there is none of a mean."""
    return None if op == "mean" else calls.bind(x, op, result="shared", world=world)()


#: What else reduces `x`: each returns the rows of the result that this rank has, or None.
REST = {
    "reduce": on_root,
    "reduce_scatter": lambda x, op, world: calls.reduce_scatter(x, op, world, check=False),
    "bind": bound,
}


@on_ranks(2, 3, 5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call", REST)
def test_other_reductions(ranks, call, dtype, checks):
    """Arrays of a row for each rank, of which each has one element or a few."""

    def body(world):
        faults, count = [], 0
        for op in operation_names(dtype_of(dtype)):
            for width in (1, 7):
                case = odd_arrays.Case(world.size, world.size * width, dtype, op)
                x = odd_arrays.rows(case)[world.rank].copy().reshape(world.size, width)
                with np.errstate(all="ignore"):
                    outcome = REST[call](x, op, world)
                if outcome is not None:
                    start = world.rank * width if outcome.size == width else 0
                    wrong = odd_arrays.wrong(outcome.reshape(-1), case, start)
                    faults += [(op, i) for i in wrong[:3]]
                    count += 1
                world.link.barrier()  # nobody writes what others still read
        assert not faults, faults[:10]
        return count

    checks += ranks(body)


def over_two_nodes(plain: World) -> World:
    """Return the World of the same ranks on two nodes, of which the first may have one more."""
    half = (plain.size + 1) // 2
    hosts = "a" * half + "b" * (plain.size - half)
    return World(plain.link, tuple(map(RankPlace, hosts)), transport=plain.transport)
