"""`hvd.elastic`: a job whose ranks are killed goes on from its last commit, or ends in one line."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.elastic import ElasticSampler
from hpctrain.transport.mpi.installation import has_ulfm, load_mpi

needs_ulfm = pytest.mark.skipif(not has_ulfm(load_mpi()), reason="this MPI has no ULFM")
ULFM = ("--with-ft", "ulfm")
full = pytest.mark.full

COMMON = """
import json, os, signal, sys
import torch
import hpctrain.horovod.torch as hvd
torch.set_num_threads(1)
def die(is_victim):
    if is_victim:
        os.kill(os.getpid(), signal.SIGKILL)
"""

TRAINING = (
    COMMON
    + """
faults = json.loads(sys.argv[1])  # of each loss: who is lost, by its first rank, and where
hvd.init()
first_rank, ranks = hvd.rank(), hvd.size()
x = torch.randn(240, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = torch.nn.Linear(6, 3).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(x, seed=3)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, steps=[])
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

def collective(where, is_victim):
    if where == "poll":
        handle = hvd.allreduce_async(torch.ones(100_000), name="large")
        die(is_victim)
        while not hvd.poll(handle):
            pass
        hvd.synchronize(handle)
    elif where == "set":
        pairs = hvd.add_process_set([0, 1])
        die(is_victim)
        while hvd.rank() < 2:
            hvd.allreduce(torch.ones(3), process_set=pairs)
    die(is_victim)
    if where == "join":
        hvd.join()
    elif where == "barrier":
        hvd.barrier()
    elif where == "parameters":
        hvd.broadcast_parameters(model.state_dict(), 0)

@hvd.elastic.run
def train(state):
    batch, lost = 0, ranks - hvd.size()
    victim, where = faults[lost] if lost < len(faults) else (-1, "")
    while batch * 2 < len(sampler):
        is_now = batch == 3
        own = list(sampler)[2 * batch : 2 * batch + 2]
        rows = hvd.allgather_object(own, name="rows")
        loss = model(x[own]).square().mean()
        if is_now and where == "late" and first_rank != victim:
            torch.randn(3_000_000).sort()  # others have lost the victim before
        if is_now and where not in ("step", "end"):
            collective(where, first_rank == victim)
        loss.backward()
        if is_now and where == "step":
            die(first_rank == victim)
        optimizer.step()
        optimizer.zero_grad()
        batch += 1
        state.steps.append(rows)
        sampler.record_batch(batch, 2)
        state.commit()
    die(where == "end" and first_rank == victim)
    return batch

train(state)
parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
everywhere = hvd.allgather_object(parameters.tolist())
if hvd.rank() == 0:
    print("RESULT", json.dumps([hvd.size(), sizes, state.steps, everywhere]))
"""
)
#: Each loss: the victim by its first rank, and the operation in which the others wait.
FAULTS = {
    "coordinator": [(0, "step"), (3, "join"), (1, "end")],
    "in operations": [(4, "poll"), (0, "set"), (3, "parameters")],
    "between operations": [(0, "barrier"), (2, "late"), (4, "poll")],
}


def replay(steps):
    """Return the parameters of one process that takes `steps`, the rows of each rank."""
    x = torch.randn(240, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for rows in steps:
        optimizer.zero_grad()
        sum(model(x[own]).square().mean() / len(rows) for own in rows).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@needs_ulfm
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [name if name == "coordinator" else pytest.param(name, marks=full) for name in FAULTS]
)
def test_training_goes_on_from_the_last_commit(start, name):
    faults = FAULTS[name]
    ended = start("-c", TRAINING, json.dumps(faults), ranks=5, flags=ULFM).finish(300)
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("RESULT"))
    size, sizes, steps, everywhere = json.loads(line[len("RESULT") :])
    assert size == 2 and sizes == [4, 3, 2]
    for left, (victim, _) in zip(sizes, faults, strict=True):
        assert f"lost rank {victim} (" in ended.stderr
        assert f"hvd.elastic.run goes on with {left} ranks" in ended.stderr
    processed = [row for rows in steps for own in rows for row in own]
    assert {*processed} == {*range(240)} and len(processed) <= 240 + 3 * 10
    for parameters in everywhere:
        assert torch.tensor(parameters, dtype=torch.float64).allclose(replay(steps), atol=1e-12)
    has_sets = "set" in [where for _, where in faults]
    assert ("process sets are not registered any more" in ended.stderr) == has_sets


ENDING = (
    COMMON
    + """
hvd.init({comm})
state, loops = hvd.elastic.TorchState(epoch=0), 0
def loop(state):
    for step in range(1000):
        die(step == 5 and hvd.rank() == 1 and hvd.size() == 3)
        hvd.allreduce(torch.ones(4))
if {is_elastic}:
    loop = hvd.elastic.run(loop)
loop(state)
"""
)
PLAIN = "this script cannot go on without it; a function under hvd.elastic.run goes on with"
ENDS = {
    "plain script": (False, None, "0", "lost rank 1 (", PLAIN),
    "ranks in another order": (True, [2, 1, 0], "0", "lost rank 1 (", PLAIN),
    "too few left": (True, None, "3", "2 ranks left, but training needs 3", "--min-ranks"),
}


@needs_ulfm
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name", [name if name == "plain script" else pytest.param(name, marks=full) for name in ENDS]
)
def test_other_jobs_end_with_one_line(start, name):
    is_elastic, comm, minimum, *texts = ENDS[name]
    code = ENDING.format(is_elastic=is_elastic, comm=comm)
    flags = (*ULFM, "-x", "HPCTRAIN_MIN_RANKS")
    env = {"HPCTRAIN_MIN_RANKS": minimum}
    ended = start("-c", code, ranks=3, flags=flags, env=env).finish(300)
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    for text in texts:
        assert ended.stderr.count(text) == 1, ended.stderr


STATES = (
    COMMON
    + """
import pickle, threading
from mpi4py import MPI
from hpctrain.horovod.torch.elastic import state as states
assert not MPI.Is_initialized()  # else mpi4py finalizes MPI, for which a lost rank is waited
hvd.init()
rank = hvd.rank()
model = torch.nn.BatchNorm1d(2)
optimizer = torch.optim.SGD(model.parameters(), lr=1 + rank, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
torch.nn.init.constant_(model.weight, rank)

def step(state):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state.rows.append(7)

def values(state):
    return pickle.dumps([
        {k: v.tolist() for k, v in model.state_dict().items()}, optimizer.param_groups[0]["lr"],
        [s["momentum_buffer"].tolist() for s in optimizer.state.values()], scheduler.last_epoch,
        state.rows, state.batch,
    ])

state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, rows=[rank], batch=rank)
step(state)
state.batch = 5 + rank
state.sync()
assert state.batch == 5 and state.rows == [0, 7] and optimizer.param_groups[0]["lr"] == 0.5
assert len({*hvd.allgather_object(values(state))}) == 1
synced = values(state)
for _ in range(2):  # a restored state can be restored again
    step(state)
    state.batch = 9
    assert values(state) != synced
    state.restore()
    assert values(state) == synced and state.model is model and state.scheduler is scheduler
step(state)
state.commit()
committed = values(state)
step(state)
state.restore()
assert values(state) == committed

other = torch.nn.Linear(2, 2)
state.model = other
torch.nn.init.zeros_(other.weight)
state.restore()
assert other.weight.abs().sum() > 0 and state.model is other

class Counter:
    count = 0
class CounterHandler(states.StateHandler):
    def save(self): self.saved = self.value.count
    def restore(self): self.value.count = self.saved
    def sync(self): self.value.count = hvd.broadcast_object(self.value.count, 0)
states.set_handler_registry([(Counter, CounterHandler), *states.get_handler_registry()])
counter = Counter()
counter.count = 3 + rank
state = hvd.elastic.TorchState(counter=counter)
state.sync()
counter.count = 8
state.restore()
assert counter.count == 3 and state.counter is counter
try:
    hvd.elastic.TorchState(lock=threading.Lock())
except TypeError as error:
    assert "elastic state: 'lock'" in str(error)
else:
    raise AssertionError

calls = []
@hvd.elastic.run
def interrupted(state, skips):
    calls.append(counter.count)
    counter.count += 1 + rank
    if len(calls) == 1:
        raise hvd.HostsUpdatedInterrupt(skips)
    return calls
state.register_reset_callbacks([lambda: calls.append("reset")])
assert interrupted(state, False) == [3, "reset", 4] and counter.count == 5 + rank
calls.clear()
assert interrupted(state, True) == [5, "reset", 6 + rank]

@hvd.elastic.run
def wrong(state):
    hvd.allreduce(torch.ones(2 + rank), name="differs")
try:
    wrong(state)
except hvd.HorovodInternalError as error:
    assert "differs" in str(error)
else:
    raise AssertionError
print("right on", rank)
"""
)


@pytest.mark.timeout(300)
def test_states_are_saved_restored_and_synchronized(start):
    ended = start("-c", STATES, ranks=2).finish(200)
    assert ended.returncode == 0, ended.stderr
    assert {*ended.stdout.splitlines()} == {"right on 0", "right on 1"}


@pytest.fixture
def at(monkeypatch):
    """Let this process be a rank of a job."""

    def at(rank, size):
        monkeypatch.setattr(job, "rank", lambda: rank)
        monkeypatch.setattr(job, "size", lambda: size)

    return at


def share_out(at, size, shuffle, batches, state):
    """Return the shares of all ranks from `state` on, and the state after some batches of 2."""
    shares = []
    for rank in range(size):
        at(rank, size)
        sampler = ElasticSampler(range(23), shuffle=shuffle, seed=5)
        sampler.load_state_dict(state)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[0]) == len(shares[-1])
        for batch in range(batches):
            sampler.record_batch(batch, 2)
    return shares, sampler.state_dict()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 1), (1, 4), (2, 2, 5), (24, 1)])
def test_each_sample_is_processed_once_over_losses(at, sizes, shuffle):
    state, processed = {"epoch": 1, "processed_num": 0}, []
    for size in sizes[:-1]:
        shares, state = share_out(at, size, shuffle, 1, state)
        processed += [index for share in shares for index in share[:2]]
    shares, state = share_out(at, sizes[-1], shuffle, 0, state)
    rest = [index for share in shares for index in share]
    assert {*processed, *rest} == {*range(23)}
    assert not {*processed} & {*rest} and len(processed + rest) < 23 + 2 * 24
    at(0, 1)
    sampler = ElasticSampler(range(23), shuffle=shuffle, seed=5)
    orders = []
    for epoch in (1, 2):
        sampler.load_state_dict(state)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert (orders[0] == orders[1]) == (not shuffle)
