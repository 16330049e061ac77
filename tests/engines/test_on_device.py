"""Training on a device equals training on the host; engines on stand-ins for GPUs."""

from __future__ import annotations

from functools import partial

import fakes
import numpy as np
import pytest
from ranks import on_gpus, run_on, run_on_gpus

from hpctrain import data, engines, nn, optim
from hpctrain.core import xp
from hpctrain.engines.parameter_server.server import server_thread
from hpctrain.training.trainer import Trainer

SAMPLES, BATCH, STEPS = 151, 37, 6  # the last batch of an epoch has 3 samples


def digits() -> data.Dataset:
    train = data.DigitsOptions().load(0).train
    return data.Dataset(train.x[:SAMPLES], train.y[:SAMPLES])


def trained(world, engine, optimizer=optim.sgd(0.05, 0.9), steps=STEPS, **saved):  # noqa: B008
    model = nn.MlpOptions(widths=[64, 24, 10]).build((8, 8), 10)
    trainer = Trainer(model, optimizer, engine, seed=3, world=world)
    summary = trainer.fit(digits(), steps=steps, batch=BATCH, evaluate=digits(), **saved)
    trainer.close()
    arena = trainer.replica.arena
    assert xp.on_device(arena.param) == (world.gpu is not None)
    return xp.to_host(arena.param).copy(), summary


def test_one_device_has_the_bytes_of_the_host(gpu):
    engine = engines.AllReduce()
    ((expected, on_host),) = run_on("threads", 1, lambda w: trained(w, engine))
    gpu.counts.clear()
    ((result, summary),) = run_on_gpus(1, lambda w: trained(w, engine))
    assert (result == expected).all() and gpu.counts["implicit"] == 0
    for key in ("train_loss", "test_loss", "test_accuracy", "params_sha256"):
        assert summary[key] == on_host[key], key


#: What is asked of [engine] -> steps are alike wherever they are computed
ENGINES = {
    "allreduce": engines.AllReduce(),
    "ring": engines.AllReduce(algorithm="ring", overlap="always", bucket_bytes=1024),
    "tree": engines.AllReduce(algorithm="tree", overlap="never"),
    "recursive-doubling": engines.AllReduce(algorithm="recursive-doubling"),
    "halving-doubling": engines.AllReduce(algorithm="halving-doubling"),
    "direct": engines.AllReduce(algorithm="direct"),
    "hierarchical": engines.AllReduce(algorithm="hierarchical"),
    "priority": engines.AllReduce(priority=True, bucket_bytes=1024),
    "ordered": engines.AllReduce(reduction="ordered"),
    "bf16": engines.AllReduce(compression="bf16", algorithm="ring", bucket_bytes=1024),
    "fp16": engines.AllReduce(compression="fp16", algorithm="tree"),
    # A ring, whose sums have the bits of the host: else what is the k-th largest may be another.
    "top-k": engines.AllReduce(compression="top-k", compression_ratio=0.1, algorithm="ring"),
    "powersgd": engines.AllReduce(compression="powersgd", compression_rank=2, overlap="always"),
    "shards": engines.AllReduce(shard_optimizer=True, bucket_bytes=1024),
    "ps-sync": engines.PsSync(),
    "ps-sync, colocated": engines.PsSync(placement="colocated", servers=2),
    "local-sgd": engines.LocalSgd(period=2),
    "DiLoCo": engines.LocalSgd(period=2, outer="nesterov"),
    "DASO": engines.LocalSgd(period=3, delay=1),
    "gossip, ring": engines.Gossip(graph="ring"),
}
#: What depends on who comes first
FREE = {
    "ps-async": engines.PsAsync(),
    "ps-async, push 2, pull 4": engines.PsAsync(push_every=2, pull_every=4),
    "easgd": engines.Easgd(period=2),
    "gossip": engines.Gossip(),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("mode", ["gpu", "lazy_gpu"])
@pytest.mark.parametrize("name", ENGINES)
def test_ranks_on_a_device_do_what_ranks_on_the_host_do(request, name, mode):
    machine, ranks = request.getfixturevalue(mode), 3
    expected = run_on("threads", ranks, lambda w: trained(w, ENGINES[name])[0])
    machine.counts.clear()
    result = run_on_gpus(ranks, lambda w: trained(w, ENGINES[name])[0])
    assert machine.counts["implicit"] == 0
    for item, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(item, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FREE)
def test_engines_that_wait_for_nobody(lazy_gpu, name):
    result = run_on_gpus(3, lambda w: trained(w, FREE[name])[1])
    assert lazy_gpu.counts["implicit"] == 0
    assert all(np.isfinite(item["train_loss"]) for item in result[:1])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("overlap", ["never", "always"])
def test_ranks_on_one_device_have_the_bytes_of_the_host(size, overlap):
    """Gradients are summed out of neighbours' arenas; of them not a byte visits the host."""
    engine = engines.AllReduce(algorithm="direct", overlap=overlap)
    expected = run_on("threads", size, lambda w: trained(w, engine)[0])

    def body(world):
        result, _ = trained(world, engine)
        return result, sum(
            link.endpoint.traffic.host_bytes for link in world.threads.links.get("wire", [])
        )

    with fakes.installed(lazy=True, ipc_within=True) as machine:
        for (result, host_bytes), reported in zip(run_on_gpus(size, body), expected, strict=True):
            assert (result == reported).all() and host_bytes == 0
        added = sum(n for name, n in machine.counts.items() if name.startswith("add_"))
        assert (added > 0) == (size > 1)
        assert machine.counts["implicit"] == 0


#: Engines, by what they keep beside parameters; four of them go both ways
STATES = ("allreduce", "ps-sync", "local-sgd", "ps-async", "priority", "ordered", "top-k",
          "powersgd", "shards", "ps-sync, colocated", "DiLoCo", "DASO", "gossip, ring", "easgd",
          "gossip")  # fmt: skip
WAYS = [(name, "device") for name in STATES] + [(name, "host") for name in STATES[:4]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, begins", WAYS)
def test_a_run_goes_on_elsewhere_than_it_began(tmp_path, lazy_gpu, name, begins):
    """From a device on cores, and the other way: a checkpoint does not tell where it was made."""
    engine, optimizer = (ENGINES | FREE)[name], optim.adamw(1e-3)
    places = [run_on_gpus, partial(run_on, "threads")][:: 1 if begins == "device" else -1]
    parts = [{"steps": STEPS - 2}, {"resume": True}]
    for place, part in zip(places, parts, strict=True):
        run = tmp_path / "run"
        result = place(3, lambda w, p=part, run=run: trained(w, engine, optimizer, out=run, **p))
    assert result[0][1]["steps"] >= STEPS and lazy_gpu.counts["implicit"] == 0
    if name in FREE:
        assert np.isfinite(result[0][1]["train_loss"])
        return
    expected = run_on("threads", 3, lambda w: trained(w, engine, optimizer))
    for (item, _), (other, _) in zip(
        result[:2], expected[:2], strict=True
    ):  # the last may only serve
        np.testing.assert_allclose(item, other, rtol=1e-4, atol=1e-4)


def test_a_server_has_the_gpu_of_its_rank():
    """MPI needs a context of CUDA in each thread that calls it."""
    with fakes.installed(devices=2):
        import cupy

        def body(plain):
            cupy.cuda.Device(1).use()
            with server_thread(cupy.cuda.runtime.getDevice, on_gpus(plain)) as outcome:
                pass
            return outcome.result()

        assert run_on("threads", 1, body) == [1]
