"""Node memory: every kind through one test body, and the fallback if a kind is refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.collectives import all_gather_bytes
from hpctrain.transport.shared_memory import host
from hpctrain.transport.shared_memory.host import NodeMemory

KINDS = ("memfd", "file", "window")


def shared(world, *kinds):
    """Return a Memory of all ranks, and their link."""
    return NodeMemory(world.link, partial(all_gather_bytes, world.link), kinds), world.link


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_see_what_is_written(ranks, kind):
    def body(world):
        shared_memory, link = shared(world, kind)
        x = shared_memory.zeros(1000, "float32")
        assert shared_memory.kind == kind
        assert x.ctypes.data % 64 == 0
        assert not x.any()
        x[:] = world.rank + np.arange(1000)
        link.barrier()
        arrays = shared_memory.neighbours(x[10:20])
        assert [int(y[0]) for y in arrays] == [10 + r for r in range(world.size)]
        link.barrier()
        arrays[(world.rank + 1) % world.size][:] = -1  # written into the right neighbour's array
        link.barrier()
        assert (x[10:20] == -1).all()
        assert x[20] == 20 + world.rank
        link.barrier()

    ranks(body)


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_array_for_all(ranks, kind):
    def body(world):
        shared_memory, link = shared(world, kind)
        x = shared_memory.common_zeros(100, np.float64)
        x[world.rank] = 1 + world.rank
        link.barrier()
        assert x.sum() == sum(range(world.size + 1))
        link.barrier()

    ranks(body)


@on_ranks(1, 2)
def test_other_arrays_are_nobodys(ranks):
    def body(world):
        shared_memory, _ = shared(world, *KINDS)
        x = shared_memory.zeros(100, np.float32)
        assert shared_memory.neighbours(np.zeros(5)) is None
        assert (shared_memory.neighbours(x) is None) == (world.size == 1)
        assert (shared_memory.kind is None) == (world.size == 1)

    ranks(body)


REFUSALS = {
    "no memfd": ({"_anonymous": OSError}, "file"),
    "an old kernel": ({"_anonymous": AttributeError}, "file"),
    "nothing but windows": ({"_anonymous": OSError, "_named": OSError}, "window"),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_all_fall_back_where_one_is_refused(monkeypatch, row):
    refused, kind = REFUSALS[row]
    names = {"_anonymous": "memfd", "_named": "file"}

    def body(world):
        shared_memory, link = shared(world, *KINDS)
        x = shared_memory.zeros(10, np.float32)
        x[0] = world.rank
        link.barrier()
        assert [y[0] for y in shared_memory.neighbours(x)] == [0, 1, 2]
        link.barrier()
        return shared_memory.kind

    makers = dict(host.FILE_MAKERS)
    for name, error in refused.items():
        makers[names[name]] = partial(_refuse, error)
    monkeypatch.setattr(host, "FILE_MAKERS", makers)
    assert run_on("threads", 3, body) == [kind] * 3


def _refuse(error):
    raise error


def test_too_little_memory_is_no_crash():
    """All ranks skip a kind that cannot hold the array; in the end each has private memory."""

    def body(world):
        shared_memory, _ = shared(world, "file")
        assert shared_memory._allocate_shared(1 << 60) is None
        assert shared_memory.kind is None
        assert shared_memory.neighbours(shared_memory.zeros(10, np.float32)) is None

    run_on("threads", 2, body)


def test_a_window_that_one_rank_is_refused_is_none():
    """Then nothing is shared: all ranks agree on it, and have private arrays."""

    def body(world):
        endpoint = world.link.endpoint

        def refused(nbytes):
            pages = endpoint.window(nbytes)
            return [] if world.rank == 1 else pages

        world.link.endpoint = replace(endpoint, window=refused)
        shared_memory, _ = shared(world, "window")
        assert shared_memory.neighbours(shared_memory.zeros(10, np.float32)) is None
        return shared_memory.kind

    assert run_on("threads", 3, body) == [None] * 3


def test_nothing_stays_behind():
    """Regions go with their arrays; the guard looks for files, descriptors and mappings."""

    def body(world):
        for kind in ("memfd", "file"):
            shared_memory, link = shared(world, kind)
            gone = weakref.ref(shared_memory.zeros(10, np.float32).base)
            gc.collect()
            assert gone() is None
            assert not shared_memory._regions
            link.barrier()

    run_on("threads", 2, body)
