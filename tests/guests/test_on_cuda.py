"""Tensors of CUDA under torch.distributed, `ht.torch` and `sync`, on stand-ins for CuPy and CUDA.

Work in a stream is done when somebody waits for that stream, so what nothing orders is read too
early. Ranks are threads.
"""

from __future__ import annotations

import gc
import weakref
from threading import Thread
from types import SimpleNamespace

import fakes
import pytest
import torch
import torch.distributed as dist
from fakes import tensors
from guests.test_synchronous import one_thread  # noqa: F401  (a fixture)
from ranks import on_gpus

from hpctrain.torch.data_movement import DataMovement
from hpctrain.torch.reductions import Reductions
from hpctrain.torch.work import RunningWork
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
SIZE, N = 2, 1000
TOTAL = float(sum(range(1, SIZE + 1)))


class InThread:
    """The progress of a group whose asynchronous operations each have a thread."""

    def run(self, name, nbytes, call):
        call()

    def start(self, operation, results):
        def run():
            try:
                operation.call()
            except BaseException as error:
                work.fail(error)
            else:
                work.finish()

        thread = Thread(target=run)
        work = RunningWork(results, lambda _: thread.join())
        thread.start()
        return work


class Group(Reductions, DataMovement):
    """The operations of a process group, of ranks that are threads."""

    def __init__(self, world):
        super().__init__(SimpleNamespace(group=world.main, world=world, ranks=range(world.size),
                                         progress=InThread()))  # fmt: skip


def reduced(group, x, *, waits=True):
    """All-reduce `x`; asynchronous unless it `waits`."""
    return group.allreduce([x], SimpleNamespace(reduceOp=dist.ReduceOp.SUM, asyncOp=not waits))


def rank_values(world, length=N):
    return tensors.on_cuda(torch.full((length,), world.rank + 1.0))


def leaves_no_tensor_alive(world):
    """A bound call knows an address, and holds no tensor."""
    group, dropped = Group(world), []
    for length in range(1, 20):
        x = rank_values(world, length)
        reduced(group, x)
        assert (x.cpu() == TOTAL).all()
        dropped.append(weakref.ref(x))
        del x
    gc.collect()
    assert not [tensor for tensor in dropped if tensor() is not None]


BODIES = {
    "dropped tensors": leaves_no_tensor_alive,
}


@pytest.mark.parametrize("name", BODIES)
def test_tensors_of_cuda(name):
    with fakes.installed(lazy=True, ipc_within=True), tensors.cuda():
        run_ranks(SIZE, lambda link: BODIES[name](on_gpus(over_threads(link))), timeout_s=20)
