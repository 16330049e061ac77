"""Horovod's operations on tensors of CUDA, on stand-ins for CuPy and CUDA. Ranks are threads."""

from __future__ import annotations

import fakes
import pytest
import torch
from fakes import tensors
from ranks import on_gpus

from hpctrain.horovod.torch.named import requests
from hpctrain.horovod.torch.named.entries import Entry
from hpctrain.horovod.torch.named.execution import Execution
from hpctrain.horovod.torch.named.requests import Decision, Request
from hpctrain.horovod.torch.named.settings import Settings
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
SIZE, N = 2, 1000
TOTAL = sum(range(1, SIZE + 1))


class Operations:
    """Entries of a rank, submitted in a stream of its own, and run in another."""

    def __init__(self, world):
        self.execution = Execution(world, range(SIZE), Settings(), world.trace)
        self.entries: dict[str, Entry] = {}

    def submit(self, kind, sources, targets, shapes=None, **fields):
        shapes = shapes or tuple(tuple(x.shape) for x in sources)
        request = Request(
            f"{kind}.{len(self.entries)}", kind, "float32", shapes, device="cuda", **fields
        )
        self.entries[request.name] = entry = Entry(request, sources, targets)
        return entry

    def run(self):
        with torch.cuda.stream(torch.cuda.Stream()):
            for entry in list(self.entries.values()):
                self.execution.add(Decision(entry.request), self.entries)
            submitted = list(self.entries.values())
            self.execution.run()
        for entry in submitted:
            assert not entry.error, entry.error


def late(world, *shape):
    """Return a tensor that the current stream doubles when it is waited for."""
    x = tensors.on_cuda(torch.full(shape, world.rank + 1.0))
    x.mul_(2)
    return x


def reductions(world, lengths, **fields):
    calls, side = Operations(world), torch.cuda.Stream()
    with torch.cuda.stream(side):
        entries = []
        for length in lengths:
            x = late(world, length)
            entries.append(calls.submit(requests.ALLREDUCE, [x], [x], op="Sum", **fields))
    calls.run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return [entry.outputs[0].clone().cpu() for entry in entries]


def fused_reductions_read_what_their_callers_wrote(world):
    for x in reductions(world, (N, 3, 70_000)):
        assert (x == 2 * TOTAL).all()


def factors_are_applied_in_order(world):
    for x in reductions(world, (N,), prescale=0.5, postscale=3.0):
        assert (x == 3 * TOTAL).all()


def movements_read_what_their_callers_wrote(world):
    calls = Operations(world)
    with torch.cuda.stream(torch.cuda.Stream()):
        own, x = late(world, world.rank + 1, 2), late(world, N)
        rows = calls.submit(requests.ALLGATHER, [own], [], ((-1, 2),))
        copy = calls.submit(requests.BROADCAST, [x], [x], root=1)
        parts = calls.submit(requests.ALLTOALL, [x], [], ((-1,),))
        parts.splits = [N // 2, N // 2]
        sums = calls.submit(requests.REDUCESCATTER, [late(world, N)], [], op="Average")
    calls.run()
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = torch.tensor([2.0, 4.0, 4.0]).reshape(-1, 1).expand(-1, 2)
        assert torch.equal(rows.result[0].clone().cpu(), expected)
        assert (copy.outputs[0].clone().cpu() == 4).all()
        assert (parts.result[0].clone().cpu() == 4).all()  # after the broadcast
        assert (sums.result[0].clone().cpu() == TOTAL).all()


BODIES = [
    fused_reductions_read_what_their_callers_wrote,
    factors_are_applied_in_order,
    movements_read_what_their_callers_wrote,
]


@pytest.mark.parametrize("body", BODIES)
def test_operations_on_cuda(body):
    with fakes.installed(lazy=True, ipc_within=True), tensors.cuda():
        run_ranks(SIZE, lambda link: body(on_gpus(over_threads(link))), timeout_s=20)
