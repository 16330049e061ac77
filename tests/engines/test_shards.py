"""A sharded optimizer: the update of one rank, the same bytes on the wire, 1/P of the memory.

Shards belong to ranks, or where a node shares its parameters to the ranks of each node. The model
has six blocks, which no number of ranks here divides but 2 and 3; with nine, some of the shards
are empty. That P ranks equal one rank: test_equal_to_one_rank.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data, engines, nn, optim
from hpctrain.collectives import all_gather_bytes
from hpctrain.core.errors import UsageError
from hpctrain.gradients.arena import params_sha256
from hpctrain.gradients.replica import ModelReplica
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.training.trainer import Trainer
from hpctrain.transport.paths import RankPlace
from hpctrain.transport.shared_memory.host import NodeMemory
from hpctrain.world import World

STEPS, BATCH = 3, 20
MODEL = nn.MlpOptions(widths=[64, 1024, 256, 10])
SHARDS = engines.AllReduce(shard_optimizer=True, bucket_bytes=100_000)
SHARED = engines.AllReduce(share_parameters=True)
METHODS = {
    "momentum": optim.sgd(0.1, 0.9, weight_decay=0.1, exempt_vectors=True),
    "clipping": optim.sgd(0.1, 0.9, clip_norm=0.1),
    "adamw": optim.adamw(0.01),
    "lars": optim.lars(1.0, weight_decay=0.1, clip_norm=0.1),
    "lamb": optim.lamb(0.01, clip_norm=0.1),
}


@cache
def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:50], train.y[:50])  # batches of 20, 20 and 10


def trainer_of(world, optimizer, engine=SHARDS, precision="float32") -> Trainer:
    return Trainer(MODEL.build((8, 8), 10), optimizer, engine, precision=precision, world=world)


def sharded(world, method: str, precision: str, engine=SHARDS):
    """Return this rank's range of the gradient of each step, its state and all parameters."""
    observed, states = [], []
    optimizer = METHODS[method]

    def update(grad, state, *rest):
        observed.append(grad.tobytes())
        optimizer.update(grad, state, *rest)

    def init(param):
        states.append(optimizer.init(param))
        return states[0]

    spied = optimizer._replace(init=init, update=update)
    trainer = trainer_of(world, spied, engine, precision)
    trainer.fit(digits(), steps=STEPS, batch=BATCH)
    trainer.close()
    every = b"".join(observed)  # in a step, the optimizer may be given one piece after the other
    size = len(every) // STEPS
    ranges = [every[i * size : (i + 1) * size] for i in range(STEPS)]
    return ranges, states[0], trainer.replica.arena.param


def joined(link, parts: list[bytes], precision: str) -> list[np.ndarray]:
    """Return flat arrays of which each rank has a part."""
    return [np.frombuffer(b"".join(all_gather_bytes(link, part)), precision) for part in parts]


@pytest.mark.sample(3)
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
@on_ranks(2, 4, 9, mpi=(3,))
def test_the_update_is_that_of_one_rank(ranks, method, precision):
    """Of the same sum of gradients all shards make the same bytes: parameters and state."""

    ranks(update_of_one_rank, SHARDS, method, precision)


def update_of_one_rank(world, engine, method: str, precision: str, hosts: str = ""):
    """Compare with one rank's update; `hosts` are those of ranks that share, a letter each."""
    if hosts:
        world = World(world.link, tuple(map(RankPlace, hosts)), concurrent=world.concurrent)
    link = world.node if hosts else world.link
    observed, state, param = sharded(world, method, precision, engine)
    names = [name for name in state if name != "step"]
    arena = ModelReplica(MODEL.build((8, 8), 10), 0, np.dtype(precision)).arena
    alone, start = METHODS[method].init(arena.param), arena.param.copy()
    for grad in joined(link, observed, precision):
        METHODS[method].update(grad, alone, arena.param, arena.slots, lambda rows: rows)
    assert param.tobytes() == arena.param.tobytes() != start.tobytes()
    assert state["step"] == alone["step"] == STEPS
    pieces = joined(link, [state[name].tobytes() for name in names], precision)
    for name, array in zip(names, pieces, strict=True):
        assert array.tobytes() == alone[name].tobytes()
    world.must_agree(params_sha256(arena), "parameters")


LAYOUTS = {2: ("aa", "ab"), 4: ("aaaa", "aabb"), 5: ("aabbb", "ababb")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", range(2))
@on_ranks(2, 4, 5, mpi=(2, 4))
def test_parameters_of_a_node_get_the_update_of_one_rank(ranks, layout, method):
    def body(world):
        hosts = LAYOUTS[world.size][layout]
        update_of_one_rank(world, SHARED, method, "float32", hosts)

    ranks(body)


@on_ranks(3, mpi=(2, 3))
def test_a_node_has_one_array_of_parameters(ranks):
    """What one rank writes there, all others read."""

    def body(world):
        trainer = trainer_of(world, METHODS["momentum"], SHARED)
        param = trainer.replica.arena.param
        if world.rank == world.size - 1:
            param[:] = 7
        world.link.barrier()
        assert (param == 7).all()
        metrics = trainer.evaluate(digits())
        trainer.close()
        return metrics["loss"]

    assert len(set(ranks(body))) <= 1  # none where this process only looks on


def test_where_no_memory_can_be_shared_all_ranks_say_so():
    def body(world):
        world = replace(world, memory=NodeMemory(world.node, world.gather, kinds=()))
        with pytest.raises(UsageError, match=r"share_parameters: expected \d+ bytes of memory"):
            trainer_of(world, METHODS["momentum"], SHARED)

    run_on("threads", 2, body)


@pytest.mark.sample(1)
@on_ranks(2, 3, 4)
def test_as_many_bytes_as_a_ring_and_a_part_of_the_memory(ranks):
    def cost(world, engine):
        states = []
        optimizer = METHODS["adamw"]

        def init(param):
            states.append(optimizer.init(param))
            return states[0]

        trainer = trainer_of(world, optimizer._replace(init=init), engine)
        before = trainer.engine.bytes_sent
        trainer.fit(digits(), steps=STEPS, batch=BATCH)
        sent = trainer.engine.sum(np.array([trainer.engine.bytes_sent - before]))
        trainer.close()
        return float(sent[0]), states[0]["mean"].size, trainer.replica.arena.param.size

    def body(world):
        sent, saved, size = cost(world, SHARDS)
        ring, _, _ = cost(world, engines.AllReduce(algorithm="ring"))
        n = size * 4
        assert sent == ring >= STEPS * 2 * n * (world.size - 1)
        assert saved <= size / world.size + BLOCK_ELEMENTS

    ranks(body)


ROWS = [("shards", 3, "whole", 2), ("whole", 2, "shards", 4), ("shards", 4, "shards", 2),
        ("shards", 2, "whole", 1), ("shared", 3, "whole", 1), ("whole", 1, "shared", 2),
        ("shared", 2, "shared", 4), ("shared", 4, "shards", 3)]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "before", "then", "after"), ROWS)
def test_a_checkpoint_fits_any_number_of_shards(tmp_path, first, before, then, after):
    ways = {"shards": SHARDS, "shared": SHARED, "whole": engines.AllReduce()}

    def fit(world, way, steps, out=None, resume=False):
        trainer = trainer_of(world, optim.sgd(0.1, 0.9), ways[way], "float64")
        trainer.fit(digits(), steps=steps, batch=BATCH, out=out, resume=resume)
        trainer.close()
        return trainer.replica.arena.param

    run_on("threads", before, lambda w: fit(w, first, 3, tmp_path / "run"))
    resumed = run_on("threads", after, lambda w: fit(w, then, 6, tmp_path / "run", True))
    (complete,) = run_on("threads", 1, lambda w: fit(w, "whole", 6))
    for param in resumed:
        assert abs(param - complete).max() < 1e-12
