"""Guests in jobs that lose ranks: Trainers and `ht.torch.sync` go on, plain scripts are ended.

Between threads ranks are killed in a call of a link, over MPI (Open MPI with ULFM) by SIGKILL.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.gradient_sync.synchronous import GradientSync
from hpctrain.torch.job import refuse_spares
from hpctrain.training.run_options import ElasticOptions
from hpctrain.transport.mpi.installation import has_ulfm, load_mpi
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "pytorch"
needs_ulfm = pytest.mark.skipif(not has_ulfm(load_mpi()), reason="this MPI has no ULFM")
ULFM = ("--with-ft", "ulfm")
STEPS, BATCH = 10, 20
NEVER = {0: 10**9}
_generator = np.random.default_rng(0)
X, Y = _generator.normal(size=(200, 6)), _generator.integers(3, size=200)
_lock = threading.Lock()  # of PyTorch's generator, which all ranks of the process share


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_module(norm=nn.Identity) -> nn.Module:
    with _lock:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), norm(8), nn.ReLU(), nn.Linear(8, 3))


def fit(engine, kills, ranks=3, spares=0, norm=nn.Identity, calls=None):
    """Train a module between threads; return the summaries of the ranks that are left.

    `calls`, a list, gets of each rank those of its links before and after the training.
    """

    def body(link):
        module = make_module(norm)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        trainer = ht.torch.Trainer(
            module, optimizer, engine(), world=over_threads(link, spares=spares),
            schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        )  # fmt: skip
        elastic = ElasticOptions(copy_steps=3, copies=2)
        before = link.hub.job.calls[link.rank]
        summary = trainer.fit((X.astype("f4"), Y), steps=STEPS, batch=BATCH, elastic=elastic)
        if calls is not None:
            calls.append((before, link.hub.job.calls[link.rank]))
        return summary

    results = run_ranks(ranks + spares, body, 20.0, kills)
    return [summary for summary in results if summary is not None]


def call_at(part, calls):
    """Return the call of links at a part of a training, by the `calls` of one without a loss."""
    first, last = max(before for before, _ in calls), min(after for _, after in calls)
    return round(first + part * (last - first))


ORDERED = {
    "whole state": lambda: ht.engines.AllReduce(reduction="ordered"),
    "shards": lambda: ht.engines.AllReduce(reduction="ordered", shard_optimizer=True),
}


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", ORDERED)
def test_a_module_ends_with_the_bytes_of_the_undisturbed_run(name, spares):
    calls: list = []
    (whole, *_) = fit(ORDERED[name], NEVER, calls=calls)
    for victim in (0, 1):
        left = fit(ORDERED[name], {victim: call_at(0.6, calls)}, spares=spares)
        assert len(left) == 2 + spares
        assert left[0]["recoveries"], "nobody was lost: the call came too late"
        assert {summary["params_sha256"] for summary in left} == {whole["params_sha256"]}


@pytest.mark.parametrize(
    "engine", [ht.engines.PsSync, ht.engines.PsAsync, ht.engines.LocalSgd, ht.engines.Gossip]
)
def test_modules_with_buffers_go_on_under_other_engines(engine):
    calls: list = []
    fit(engine, NEVER, ranks=4, norm=nn.BatchNorm1d, calls=calls)
    left = fit(engine, {1: call_at(0.6, calls)}, ranks=4, norm=nn.BatchNorm1d)
    assert len(left) == 3 and left[0]["steps"] == STEPS and left[0]["recoveries"]


def share_of(step, rank, size):
    return torch.arange(step * BATCH, (step + 1) * BATCH)[rank::size] % len(X)


def add_gradients(module, indexes, parts, synced=None):
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    pieces = indexes.chunk(parts)
    for i, piece in enumerate(pieces):
        is_last = synced is None or i == len(pieces) - 1
        with contextlib.nullcontext() if is_last else synced.no_sync():
            (nn.functional.cross_entropy(module(x[piece]), y[piece]) / parts).backward()


def parameters_of(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def run_loop(kills, options, ranks, parts, rows, calls=None):
    """Run a loop of `ht.torch.sync` between threads; append (step, share, ranks summed) to rows.

    `calls`: as in `fit`.
    """

    def body(link):
        world, module = over_threads(link), make_module().double()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        with GradientSync(world, module, optimizer, options) as synced:
            before = link.hub.job.calls[link.rank]
            for step in range(STEPS):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                share = share_of(step, world.rank, world.size)
                add_gradients(module, share, parts, synced)
                rows.append((step, share, world.size))
                optimizer.step()
                assert synced.retry(lambda n=step: world.gather(f"{n}")) == [f"{step}"] * world.size
            if calls is not None:
                calls.append((before, link.hub.job.calls[link.rank]))
        return parameters_of(module)

    return run_ranks(ranks, body, 20.0, kills)


def replay(rows, parts):
    """Return the parameters of one rank that sums the gradients of the shares in `rows`."""
    module = make_module().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(STEPS):
        shares = [(share, count) for n, share, count in rows if n == step]
        ranks = shares[0][1]
        assert {count for _, count in shares} == {ranks} and len(shares) == ranks
        optimizer.zero_grad()
        for share, _ in shares:
            add_gradients(module, share, parts)
        for parameter in module.parameters():
            parameter.grad /= ranks
        optimizer.step()
    return parameters_of(module)


WIRES = {
    "after backward": WireOptions(),
    "buckets in a thread": WireOptions(algorithm="ring", overlap="always", bucket_bytes=64),
}


@pytest.mark.parametrize("parts", [1, 2], ids=["", "no_sync"])
@pytest.mark.parametrize("wire", WIRES)
def test_each_sum_has_the_gradients_of_those_that_are_left(wire, parts):
    """Kills come within a step or between two; a rank that has voted may be killed before its row:
    then a row is missing, and the step is not compared."""
    lost = compared = 0
    calls: list = []
    run_loop(NEVER, WIRES[wire], 3, parts, [], calls)
    for part in np.linspace(0.05, 0.95, 10):
        rows, call = [], call_at(part, calls)
        results = run_loop({1: call}, WIRES[wire], 3, parts, rows)
        left = [result for result in results if result is not None]
        assert all(np.array_equal(left[0], result) for result in left)
        lost += len(left) == 2
        if all(sum(n == step for n, *_ in rows) == count for step, _, count in rows):
            assert abs(replay(rows, parts) - left[0]).max() < 1e-12
            compared += 1
    assert lost >= 5 and compared >= 8


def test_losses_one_after_the_other_leave_one_rank():
    calls: list = []
    run_loop(NEVER, WireOptions(), 3, 1, [], calls)
    left = run_loop({0: call_at(0.2, calls), 2: call_at(0.6, calls)}, WireOptions(), 3, 1, [])
    assert [result is not None for result in left] == [False, True, False]


def test_spares_are_refused_by_loops_of_the_users_own():
    def body(link):
        with pytest.raises(UsageError, match="spares cannot join a loop of your own"):
            refuse_spares(over_threads(link, spares=1))

    run_ranks(2, body, 20.0, NEVER)


KILL = """
import os, signal, threading, runpy, sys
import torch; torch.set_num_threads(1)
import hpctrain as ht
if ht.init("cpu").rank == {victim}:
    step = torch.optim.AdamW.step
    def count(*args, n=[0], **options):
        n[0] += 1
        if n[0] == 7: os.kill(os.getpid(), signal.SIGKILL)
        return step(*args, **options)
    torch.optim.AdamW.step = count
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@needs_ulfm
@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_example_goes_on_over_mpi(start, victim):
    job = start("-c", KILL.format(victim=victim), EXAMPLES / "survive.py", ranks=3, flags=ULFM)
    ended = job.finish(timeout=90)
    assert f"lost rank {victim} (" in ended.stderr and "goes on with 2 ranks" in ended.stderr
    assert "2 ranks: accuracy 0.9" in ended.stdout


PLAIN = """
import os, signal, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("hpctrain")
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
for step in range(2000):
    if step == 5 and rank == {victim}:
        print("fault", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if {messages}:
        work = dist.isend(torch.ones(4), (rank + 1) % size)
        dist.recv(torch.zeros(4), (rank - 1) % size)
        work.wait()
    else:
        model(torch.ones(3, 8)).sum().backward()
    time.sleep(0.005)
"""


@needs_ulfm
@pytest.mark.timeout(150)
@pytest.mark.parametrize("messages", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_plain_script_ends_and_one_rank_names_the_lost_one(start, victim, messages):
    job = start("-c", PLAIN.format(victim=victim, messages=messages), ranks=3, flags=ULFM)
    job.until("fault", timeout=100)
    ended = job.finish(timeout=30)
    assert ended.returncode != 0
    text = "a script of torch.distributed cannot go on without it"
    assert f"lost rank {victim} (" in ended.stderr and ended.stderr.count(text) == 1
    assert "Traceback" not in ended.stderr
