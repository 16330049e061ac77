"""Engines on ranges of a model: a grid of data x stages has the bytes of the data axis alone.

Each rank of the grid holds the slots of one stage, and a stage's ranks are the World of an engine.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from ranks import run_on

from hpctrain import checkpoint, engines, nn, optim
from hpctrain.checkpoint import restore
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.engines import Flags, Task, base
from hpctrain.engines.base import PipeRow
from hpctrain.engines.parameter_server import engine as server_engine
from hpctrain.engines.parameter_server.engine import ParameterServerEngine
from hpctrain.engines.parameter_server.shard import Order
from hpctrain.engines.saved_state import SavedState
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.replica import Batch
from hpctrain.optim.norms import ordered_rows
from hpctrain.optim.optimizer import BLOCK_ELEMENTS as BLOCK
from hpctrain.training import run_facts, weights
from hpctrain.world import over_threads
from hpctrain.world.grid import Grid

SHAPES = {"a": (300,), "b": (BLOCK // 2, 2), "c": (7,), "empty": (0,), "d": (201, 200),
          "e": (BLOCK + 77,), "f": (33, 2)}  # fmt: skip
NAMES = tuple(SHAPES)
#: the slots of each stage
CUTS = {
    "1": (NAMES,),
    "2": (NAMES[:2], NAMES[2:]),
    "2, vee": (("a", "f"), ("b", "c", "empty", "d", "e")),
    "3": (("a",), ("b", "c", "empty"), ("d", "e", "f")),
    "2, one without slots": ((), NAMES),
    "4": (("a", "b"), ("c", "empty", "d"), ("e",), ("f",)),
}
DATA = 2
SGD = optim.sgd(0.1, 0.9, clip_norm=1.0)
LAMB = optim.lamb(0.1, clip_norm=1.0)
ADAMW = optim.adamw(0.01)
#: where the order of events is fixed
WAYS = {
    "allreduce": (engines.AllReduce(), LAMB),
    "shards": (engines.AllReduce(shard_optimizer=True), LAMB),
    "one array per node": (engines.AllReduce(share_parameters=True), LAMB),
    "one array per node, one pass": (engines.AllReduce(share_parameters=True), ADAMW),
    "top-k": (engines.AllReduce(compression="top-k", compression_ratio=0.1), SGD),
    "local sgd": (engines.LocalSgd(period=2), LAMB),
    "diloco": (engines.LocalSgd(period=2, outer="nesterov"), ADAMW),
    "daso": (engines.LocalSgd(period=3, delay=2), SGD),
    "gossip": (engines.Gossip(graph="ring"), LAMB),
    "servers": (engines.PsSync(placement="colocated", servers=2), LAMB),
    "servers, slice by slice": (engines.PsSync(placement="colocated", servers=2), ADAMW),
}

FREE_WAYS = {
    "asynchronous": (engines.PsAsync(placement="colocated", servers=2), ADAMW),
    "easgd": (engines.Easgd(placement="colocated", servers=2, period=2), ADAMW),
    "gossip in pairs": (engines.Gossip(), ADAMW),
}


class Slots:
    """A Replica of some slots whose gradient is a function of slot, worker and parameters."""

    loss = nn.mean_squared_error
    normalizes_batch = False

    def __init__(self, own: tuple[str, ...]):
        self.arena = arenas.make_arena(SHAPES, "float32", own=own)
        for name, view in self.arena.views(self.arena.param).items():
            view[...] = np.random.default_rng(NAMES.index(name)).standard_normal(view.shape)

    def gradient(self, batch, scale, key, on_ready):
        params, grads = (self.arena.views(x) for x in (self.arena.param, self.arena.grad))
        for slot in reversed(self.arena.slots):
            seed = [NAMES.index(slot.name), int(batch.inputs[0]), key.step]
            rng = np.random.default_rng(seed)
            b = rng.standard_normal(slot.shape, np.float32)
            grads[slot.name][...] = np.float32(scale) * (params[slot.name] - b)
            on_ready(slot.name)
        return {"loss": nn.Total(1.0, 1)}

    def evaluate(self, batch, observe=None):
        return {}

    def move(self, **planes):
        for name, x in planes.items():
            x[...] = getattr(self.arena, name)
        self.arena = replace(self.arena, **planes)


class Worker:
    """The work of one worker of the data axis."""

    max_drops = 0

    def __init__(self, worker: int):
        self._worker = worker

    def task(self, step):
        batch = Batch(np.array([self._worker]), np.zeros(1, np.int64), 1)
        return Task(batch, 1 / DATA, nn.Key(0, step, 0))

    def record(self, step, sums):
        pass

    def flags(self):
        return Flags()


def gather(link, cut, layout, rows):
    parts = [np.frombuffer(x).reshape(-1, rows.shape[1]) for x in
             all_gather_bytes(link, rows.tobytes())]  # fmt: skip
    return ordered_rows(parts, cut, layout)


def make_engine(world, cut_name: str, way: str):
    """Return the engine of one rank of the grid: that of its stage."""
    cut, (options, optimizer) = CUTS[cut_name], (WAYS | FREE_WAYS)[way]
    stage, worker = world.rank // DATA, world.rank % DATA
    data = over_threads(world.link.split(stage, worker))
    pipe = over_threads(world.link.split(worker, stage))
    grid = Grid(pipe.main, pipe.threads.link_for("stages"), pipe.threads.link_for("norms"))
    data = replace(data, grid=grid, voters=world.main)
    replica = Slots(cut[stage])
    arena = replica.arena
    gather_rows = partial(gather, data.grid.norms, cut, arena.layout)
    replica.arena = replace(arena, gather_rows=gather_rows)
    return options.build(data, replica, optimizer)


def train(world, cut: str, way: str, run, interval: tuple[int, int], resume: bool = False):
    """Train over `interval`, from a checkpoint if there is one; save; return hash and pieces."""
    start, stop = interval
    engine = make_engine(world, cut, way)
    if resume:
        checkpoint.load(run, world.link, request=lambda reader: engine.load(SavedState(reader)))
    step, _ = engine.train(Worker(engine.worker), start, stop)
    assert step == stop
    engine.settle()
    about = {"weights": weights.layout(engine.replica.arena)}
    pieces = engine.state()
    checkpoint.save(run, stop, pieces, about, world.link)
    sha256 = run_facts.trained_sha256(world, engine)
    spans = [(p.name, p.offset, len(p.array), p.size) for p in pieces]
    engine.close()
    return sha256, spans


def on_grid(cut: str, body):
    return run_on("threads", DATA * len(CUTS[cut]), body)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function: the hashes of the data axis alone after each interval, and its arrays."""

    @cache
    def of(way: str):
        run = tmp_path_factory.mktemp("run")
        first = on_grid("1", lambda world: train(world, "1", way, run, (0, 4)))
        second = on_grid("1", lambda world: train(world, "1", way, run, (4, 7), resume=True))
        return first[0][0], second[0][0], arrays_of(run)

    return of


def arrays_of(run):
    """Return the bytes of all arrays of the newest checkpoint of a run."""
    loaded = run_on("threads", 1, lambda world: restore.load(run, world.link))[0]
    return {name: x.tobytes() for name, x in loaded.arrays.items()}, loaded.params_sha256


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [name for name in CUTS if name != "1"])
def test_a_grid_has_the_bytes_of_its_data_axis(alone, tmp_path, cut, way):
    """Also of checkpoints, which each cut resumes from another one's."""
    others = list(CUTS)
    then = others[(others.index(cut) + 1) % len(others)]
    first, second, arrays = alone(way)
    results = on_grid(cut, lambda world: train(world, cut, way, tmp_path, (0, 4)))
    assert {sha256 for sha256, _ in results} == {first}
    must_cover([span for _, spans in results for span in spans])
    results = on_grid(then, lambda world: train(world, then, way, tmp_path, (4, 7), resume=True))
    assert {sha256 for sha256, _ in results} == {second}
    assert arrays_of(tmp_path) == arrays


@pytest.mark.parametrize("way", FREE_WAYS)
@pytest.mark.parametrize("cut", ["2, vee", "4"])
def test_a_free_order_of_events_is_saved_and_loaded(tmp_path, cut, way):
    """The bytes differ from run to run; each cut saves those that it loads."""
    results = on_grid(cut, lambda world: train(world, cut, way, tmp_path, (0, 4)))
    must_cover([span for _, spans in results for span in spans])
    saved = arrays_of(tmp_path)

    def save_again(world):
        engine = make_engine(world, "3", way)
        checkpoint.load(tmp_path, world.link, request=lambda x: engine.load(SavedState(x)))
        about = {"weights": weights.layout(engine.replica.arena)}
        checkpoint.save(tmp_path, 5, engine.state(), about, world.link)
        engine.close()

    on_grid("3", save_again)
    assert arrays_of(tmp_path) == saved


@pytest.fixture
def jitter(monkeypatch):
    """Delay each gradient at random, on each rank by itself."""
    good = Slots.gradient

    def gradient(*args):
        time.sleep(random.random() * 3e-3)
        return good(*args)

    monkeypatch.setattr(Slots, "gradient", gradient)


def orders_of(cut: str, way: str) -> list[list[Order]]:
    """Return the orders that each server of a grid has applied, in their sequence."""

    def body(world):
        engine = make_engine(world, cut, way)
        orders: list[Order] = []
        shard = engine._server.shard
        apply = shard.apply
        shard.apply = lambda order: (orders.append(order), apply(order))
        engine.train(Worker(engine.worker), 0, 12)
        engine.close()
        return orders

    return on_grid(cut, body)


SERVED = [way for way in FREE_WAYS if "gossip" not in way]


@pytest.mark.parametrize("way", SERVED)
@pytest.mark.parametrize("cut", ["2", "3"])
def test_the_servers_of_all_stages_apply_one_sequence_of_orders(jitter, cut, way):
    first, *others = orders_of(cut, way)
    assert len(first) > 12
    assert all(orders == first for orders in others)


@pytest.mark.parametrize("way", SERVED)
def test_a_coordinator_per_stage_is_noticed(jitter, monkeypatch, way):
    """A planted error: each stage decides by itself, and no row agrees on anything."""

    class Apart(PipeRow):
        def __init__(self, world, times):
            super().__init__(world, times)
            self._grid = None

    monkeypatch.setattr(base, "PipeRow", Apart)
    monkeypatch.setattr(
        ParameterServerEngine, "_make_order_link", lambda self, grid, server: self._links[3]
    )
    # It expects the counts of one rank.
    monkeypatch.setattr(server_engine, "broadcast_staleness", lambda link, counts: None)
    runs = (orders_of("2", way) for _ in range(20))  # which may agree by chance
    assert any(orders != first for first, *others in runs for orders in others)


def must_cover(spans) -> None:
    """Check that each element of each array has exactly one piece."""
    sizes = {name: size for name, _, _, size in spans}
    for name, size in sizes.items():
        own = sorted((offset, offset + n) for other, offset, n, _ in spans if other == name and n)
        bounds = [(0, 0), *own, (size, size)]
        assert all(a[1] == b[0] for a, b in pairwise(bounds)), name


def test_a_range_that_is_not_congruent_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(arenas, "BLOCK_ELEMENTS", 16)
    with pytest.raises(Exception, match="rows of each rank"):
        on_grid("3", lambda world: train(world, "3", "shards", tmp_path, (0, 4)))


def test_powersgd_is_refused():
    options = engines.AllReduce(compression="powersgd")

    def rank(world):
        replica = Slots(CUTS["2"][world.rank // DATA])
        data = world.link.split(world.rank // DATA, world.rank)
        options.build(over_threads(data), replica, SGD)

    with pytest.raises(UsageError, match="'powersgd' is not yet available where ranks hold parts"):
        on_grid("2", rank)
