"""Pushes from a device overlap with backward, and pulls with receives."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from limits import clock
from ranks import run_on, run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.core import xp
from hpctrain.core.errors import HpctrainError
from hpctrain.engines.base import PipeRow
from hpctrain.engines.engine import Times
from hpctrain.engines.parameter_server import push, shard
from hpctrain.engines.parameter_server.coordinator import ServerMethod
from hpctrain.engines.parameter_server.worker import Worker
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import ModelReplica
from hpctrain.training.trainer import Trainer
from hpctrain.watch.trace import Trace

STEPS = 4
WAITS = ("event sync", "stream sync", "device sync", "pageable")


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(shard, "BLOCK_ELEMENTS", 512)
    monkeypatch.setattr(shard, "SEGMENT_BYTES", 2048)


def trained(world, engine) -> np.ndarray:
    train = data.DigitsOptions().load(0).train
    model = nn.MlpOptions(widths=[64, 24, 24, 10]).build((8, 8), 10)
    trainer = Trainer(model, optim.sgd(0.05, 0.9), engine, seed=3, world=world)
    trainer.fit(data.Dataset(train.x[:64], train.y[:64]), steps=STEPS, batch=16)
    trainer.close()
    return xp.to_host(trainer.replica.arena.param).copy()


ENGINES = {
    "ps-sync": engines.PsSync(),
    "ps-async": engines.PsAsync(),
    "two gradients a push": engines.PsAsync(push_every=2, pull_every=4),
}


@pytest.mark.parametrize("name", ENGINES)
def test_one_worker_on_a_device_has_the_bytes_of_one_on_the_host(lazy_gpu, name):
    expected = run_on("threads", 2, lambda w: trained(w, ENGINES[name]))
    result = run_on_gpus(2, lambda w: trained(w, ENGINES[name]))
    assert [x.tobytes() for x in result] == [x.tobytes() for x in expected]
    assert lazy_gpu.counts["implicit"] == lazy_gpu.counts["device sync"] == 0


def test_slices_come_to_the_host_while_backward_goes_on(lazy_gpu, monkeypatch):
    """Two waits: for the loss, and until backward is done and its gradient known to be finite."""
    begun: list[Counter] = []  # what was counted when each gradient was begun
    requested: list[
        tuple[int, bool]
    ] = []  # ... and copies, work left, when all of it was asked for
    remaining: list[list[bool]] = []  # whether backward had work left as each slice left
    gradient, leave = ModelReplica.gradient, push.GradientPush.slices

    def computed(self, *args):
        import cupy

        begun.append(Counter(lazy_gpu.counts))
        sums = gradient(self, *args)
        copies = lazy_gpu.counts["D2H"] - begun[-1]["D2H"]
        requested.append((copies, not cupy.cuda.get_current_stream().done))
        return sums

    def leaving(self, link):
        import cupy

        remaining.append([])
        for item in leave(self, link):
            remaining[-1].append(not cupy.cuda.get_current_stream().done)
            yield item

    monkeypatch.setattr(ModelReplica, "gradient", computed)
    monkeypatch.setattr(push.GradientPush, "slices", leaving)
    run_on_gpus(2, lambda w: trained(w, engines.PsSync()))
    number = len(remaining[0])  # of slices
    assert number >= 4 and len(begun) == STEPS
    loss = 1  # its three numbers, on their way while backward goes on
    assert requested == [(number + loss, True)] * STEPS
    for step in remaining:
        assert step == [False] * number
    for item, other in pairwise(begun[1:]):
        waited = {kind: other[kind] - item[kind] for kind in WAITS}
        assert waited == {"event sync": loss + 1, "stream sync": 0, "device sync": 0, "pageable": 0}


def test_a_slice_goes_to_the_device_before_the_next_has_come(lazy_gpu):
    length, cut = 4000, [(0, slice(2000, 4000)), (0, slice(0, 2000))]

    def serve(link):
        before = lazy_gpu.counts["H2D"]
        for i, (_, s) in enumerate(cut):
            limit = clock() + 10
            while lazy_gpu.counts["H2D"] < before + i:
                assert clock() < limit, f"slice {i - 1} has come and is not copied"
                time.sleep(1e-3)
            link.isend(np.arange(length, dtype=np.float32)[s], 1).wait()

    def body(world):
        if world.rank == 0:
            return serve(world.link)
        arena = arenas.make_arena({"w": (length,)}, np.float32, zeros=xp.zeros)
        none = type("Replica", (), {"arena": arena})()
        check = GradientCheck(none, 1)
        times = Times()
        worker = Worker(
            row=PipeRow(world, times),
            replica=none,
            times=times,
            trace=Trace(),
            check=check,
            method=ServerMethod(1),
            push_link=world.link,
            pull_link=world.link,
            coordinator_rank=0,
            server_slices=cut,
        )
        syncs = lazy_gpu.counts["stream sync"] + lazy_gpu.counts["event sync"]
        worker._receive_slices(arena.param)
        assert lazy_gpu.counts["stream sync"] + lazy_gpu.counts["event sync"] == syncs
        assert (xp.to_host(arena.param) == np.arange(length)).all()

    run_on_gpus(2, body)


def test_a_slot_that_is_never_ready_is_named(gpu):
    arena = arenas.make_arena(dict.fromkeys("ab", (100,)), np.float32, zeros=xp.zeros)
    box = push.GradientPush(arena, [(0, slice(0, arena.grad.size))], accumulates=False)
    box.make_on_ready(is_last=True)("b")
    with pytest.raises(HpctrainError, match="on_ready never fired for slots: a"):
        box.finish_gradient(is_last=True)
