"""Tensors of CUDA under torch.distributed, `ht.torch` and `sync`, on stand-ins for CuPy and CUDA.

Work in a stream is done when somebody waits for that stream, or at random; what nothing orders is
an error either way. Ranks are threads.
"""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock, patch

import fakes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes import tensors
from fakes.races import RaceError
from guests.test_synchronous import one_thread  # noqa: F401  (a fixture)
from ranks import on_gpus

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.gradients.reducer import WireOptions
from hpctrain.torch.data_movement import DataMovement
from hpctrain.torch.gradient_sync.gradient_plane import GradientPlane
from hpctrain.torch.gradient_sync.shared_state import broadcast_buffers
from hpctrain.torch.modules.replica import TorchReplica
from hpctrain.torch.point_to_point import PointToPoint
from hpctrain.torch.progress import Progress
from hpctrain.torch.reductions import Reductions
from hpctrain.torch.tensors import caller_stream
from hpctrain.torch.work import RunningWork
from hpctrain.transport.shared_memory import cuda_ipc
from hpctrain.transport.threads import ranks
from hpctrain.world import over_threads

pytestmark = pytest.mark.either
SIZE, N = 2, 1000
TOTAL = float(sum(range(1, SIZE + 1)))


class InThread:
    """The progress of a group whose asynchronous operations run in a thread, at the first wait."""

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

        def run_in_thread(_):
            thread = Thread(target=run)
            thread.start()
            thread.join()

        work = RunningWork(results, run_in_thread)
        return work


class Messages:
    """Sends and receives by tag over a link of threads, of memory that any MPI takes."""

    def __init__(self, link):
        self.rank, self._link = link.rank, link

    def isend(self, x, dest, tag):
        assert type(x) is np.ndarray, "MPI is given a pointer of a GPU"
        return Message(self._link.isend(x, dest), dest, tag)

    def irecv(self, x, source, tag):
        assert type(x) is np.ndarray, "MPI is given a pointer of a GPU"
        return Message(self._link.irecv(x, source), source, tag)


class Message:
    name = "message"

    def __init__(self, request, peer, tag):
        self._request, self.peer, self.tag = request, peer, tag

    def wait(self, limit_s):
        self._request.wait()
        return True


class Group(Reductions, DataMovement, PointToPoint):
    """The operations of a process group, of ranks that are threads."""

    def __init__(self, world):
        entry = SimpleNamespace(enter=lambda *_: None, leave=lambda: None)
        super().__init__(SimpleNamespace(
            group=world.main, world=world, ranks=range(world.size), progress=InThread(),
            messages=Messages(world.link), entry=entry, limit_s=20.0, trace=world.trace,
        ))  # fmt: skip


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


def the_stream_that_waits_reads_the_sum(world):
    group, x = Group(world), rank_values(world)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul_(2)
        work = reduced(group, x, waits=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
        assert (x.clone().cpu() == 2 * TOTAL).all()


def shards_do_not_go_through_the_host(world):
    """As FSDP needs: sums of shards, and gathered shards."""
    group, options = Group(world), SimpleNamespace(reduceOp=dist.ReduceOp.SUM, asyncOp=False)
    part, whole = tensors.on_cuda(torch.zeros(N)), tensors.on_cuda(torch.zeros(SIZE * N))
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = rank_values(world, SIZE * N)
        rows.mul_(2)
        group.reduce_scatter_single(part, rows, options)
        part.add_(world.rank)
        group._allgather_base(whole, part, options)
    seen = torch.stack([torch.full((N,), 2 * TOTAL + rank) for rank in range(SIZE)])
    assert torch.equal(whole.cpu(), seen.reshape(-1))
    assert world.main.host_bytes == 0


def strided_tensors_are_copied_in_order(world):
    """In PyTorch's stream of the thread that runs the operation, too."""
    group, whole = Group(world), rank_values(world, 2 * N)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = whole[::2]
        x.mul_(2)
        work = reduced(group, x, waits=False)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
        assert (whole.clone().cpu()[::2] == 2 * TOTAL).all()


def later_work_of_the_caller_is_not_awaited(world):
    """So that backward of the next layers runs beside the sum of a layer."""
    group, x, done = Group(world), rank_values(world), []
    reduced(group, rank_values(world))  # buffers are made: that waits for all streams
    with torch.cuda.stream(torch.cuda.Stream()):
        work = reduced(group, x, waits=False)
        torch.cuda.current_stream().fake.put(lambda: done.append("layer"))
    work.wait()
    assert not done


def calls_in_several_streams_share_scratch_memory(world):
    group = Group(world)
    sum_in_streams(partial(reduced, group), [rank_values(world) for _ in range(4)])


def user_calls_in_several_streams_share_scratch_memory(world):
    allreduce = partial(ht.torch.allreduce, world=world)
    sum_in_streams(allreduce, [rank_values(world) for _ in range(4)])


def sum_in_streams(call, sent):
    """Sum each of `sent` in a stream of its own."""
    streams = [torch.cuda.Stream() for _ in sent]
    for x, stream in zip(sent, streams, strict=True):
        with torch.cuda.stream(stream):
            call(x)
    for x, stream in zip(sent, streams, strict=True):
        stream.synchronize()
        assert (x.cpu() == TOTAL).all()


def ranks_that_only_send_find_their_gpu(world):
    """Ranks other than the root of a gather have no result."""
    group, x = Group(world), rank_values(world)
    with torch.cuda.stream(torch.cuda.Stream()):
        targets = [torch.zeros_like(x) for _ in range(world.size)] if world.rank == 0 else []
        x.mul_(2)
        options = SimpleNamespace(rootRank=0, asyncOp=False)
        group.gather([targets] if targets else [], [x], options)
        assert all((y.cpu() == 2 * (r + 1)).all() for r, y in enumerate(targets))


def a_tensor_on_the_host_beside_one_on_a_gpu_is_refused(world):
    """On all ranks: some would wait for copies that others never make."""
    group, on_host = Group(world), torch.ones(N)
    group._compares_calls = True
    x, whole = on_host, torch.zeros(SIZE * N)
    if world.rank == 0:
        x, whole = map(tensors.on_cuda, (x, whole))
    options = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0, asyncOp=False)
    for call in (
        lambda: group.allreduce([x], options),
        lambda: group.reduce([x], options),
        lambda: group.reduce_scatter_single(x, whole, options),
        lambda: group.broadcast([x], options),
        lambda: group.gather([[x, x]], [x], options),
        lambda: group.scatter([x], [[x, x]], options),
        lambda: group.allgather([[x, x]], [x], options),
        lambda: group.all_gather_single(whole, x, options),
    ):
        with pytest.raises(UsageError, match=r"on cuda.* on cpu"):
            call()


def messages_go_through_the_host(world):
    """After the work in the stream of each call, and before the work of whoever waits."""
    group, peer, x = Group(world), 1 - world.rank, rank_values(world)
    whole = tensors.on_cuda(torch.zeros(3, N))
    for y in (whole[0], whole.T[:, 1]):
        with torch.cuda.stream(torch.cuda.Stream()):
            x.mul_(2)
            y.fill_(7)
            works = [group.recv([y], peer, 0), group.send([x], peer, 0)]
        with torch.cuda.stream(torch.cuda.Stream()):
            for work in works:
                work.wait()
            assert torch.equal(y.clone().cpu(), torch.full((N,), (peer + 1.0) * 2))
        x.div_(2)
        torch.cuda.current_stream().synchronize()


def tensors_of_the_host_need_no_cupy(world):
    x = torch.full((N,), world.rank + 1.0)
    with patch.dict(sys.modules, cupy=None):
        reduced(Group(world), x)
    assert (x == TOTAL).all()


def means_of_a_loop(world, dtype, overlap):
    """Gradients are written in one stream of PyTorch, and their means are read in another."""
    size = {"dtype": dtype, "shape": (N,), "is_cuda": True, "device": torch.device("cuda", 0)}
    parameters = {name: SimpleNamespace(grad=None, **size) for name in "ab"}
    plane = GradientPlane(world, parameters, WireOptions(overlap=overlap, bucket_bytes=N))
    with closing(plane):
        for step in (1, 2):
            with torch.cuda.stream(torch.cuda.Stream()):
                for name, p in parameters.items():
                    p.grad = tensors.on_cuda(torch.full((N,), world.rank + 1.0, dtype=dtype))
                    p.grad.mul_(step)
                    plane.collect_gradient(name)
                plane.finish()
            with torch.cuda.stream(torch.cuda.Stream()):
                plane.wait()
                plane.give_gradients()
                for p in parameters.values():
                    assert (p.grad.clone().cpu() == step * TOTAL / world.size).all()


def planes_are_allocated_once(world):
    """A GPU that has room for the planes of its ranks, and not for one more, has enough."""
    length = 1 << 20
    parameter = SimpleNamespace(grad=None, dtype=torch.float32, shape=(length,), is_cuda=True,
                                device=torch.device("cuda", 0))  # fmt: skip
    allocated = cuda_ipc.PAGE_BYTES + 4 * length  # a page begins with the token
    machine = fakes.machine_now()
    world.barrier()
    used = machine.used(0)
    world.barrier()
    machine.limits[0] = used + world.size * allocated + 2 * length
    with closing(GradientPlane(world, {"a": parameter}, WireOptions(overlap="never"))) as plane:
        assert plane.nbytes >= 4 * length


def a_module_computes_between_the_work_of_its_engine(world):
    """PyTorch's current stream and CuPy's wait for each other, whoever wrote the arena."""
    import cupy

    x = cupy.empty(N, np.float32)
    x.fill(world.rank)
    module_side = tensors.as_tensor(x)
    replica = SimpleNamespace(
        arena=SimpleNamespace(grad=x), _buffers=SimpleNamespace(load=lambda: module_side.mul_(2))
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        TorchReplica.read_arena(replica)
    assert ((x + 1).get() == 2 * world.rank + 1).all()


def gradients_are_ready_in_the_stream_of_backward(world):
    import cupy

    streams, own = [], rank_values(world)
    replica = SimpleNamespace(
        _on_ready=lambda name: streams.append(cupy.cuda.get_current_stream()),
        _grads={"w": own}, _written=set(), _unready={"w"}, loss_scale=None,
    )  # fmt: skip
    with torch.cuda.stream(torch.cuda.Stream()):
        TorchReplica._take_gradient(replica, "w", SimpleNamespace(grad=rank_values(world)))
        assert streams == [torch.cuda.current_stream().fake]


def buffers_of_the_first_rank(world):
    with torch.cuda.stream(torch.cuda.Stream()):
        buffers = [rank_values(world), rank_values(world, 3)]
        buffers[0].mul_(2)
        broadcast_buffers(world.main, buffers)
        assert (buffers[0].cpu() == 2).all() and (buffers[1].cpu() == 1).all()


BODIES = {
    **{
        f"means, {dtype}, {overlap}": partial(means_of_a_loop, dtype=dtype, overlap=overlap)
        for dtype, overlap in ((torch.float32, "always"), (torch.bfloat16, "never"))
    },
    "planes": planes_are_allocated_once,
    "engine": a_module_computes_between_the_work_of_its_engine,
    "backward": gradients_are_ready_in_the_stream_of_backward,
    "buffers": buffers_of_the_first_rank,
    "stream that waits": the_stream_that_waits_reads_the_sum,
    "strided": strided_tensors_are_copied_in_order,
    "shards": shards_do_not_go_through_the_host,
    "overlap": later_work_of_the_caller_is_not_awaited,
    "scratch": calls_in_several_streams_share_scratch_memory,
    "scratch of user calls": user_calls_in_several_streams_share_scratch_memory,
    "gather": ranks_that_only_send_find_their_gpu,
    "devices": a_tensor_on_the_host_beside_one_on_a_gpu_is_refused,
    "messages": messages_go_through_the_host,
    "host": tensors_of_the_host_need_no_cupy,
    "dropped tensors": leaves_no_tensor_alive,
}


def test_the_communication_thread_has_the_gpu_of_its_rank():
    """MPI needs a context of CUDA in each thread that calls it."""
    with fakes.installed(devices=2):
        import cupy

        seen = []
        inbox = SimpleNamespace(get=lambda: seen.append(cupy.cuda.runtime.getDevice()))
        gpu = SimpleNamespace(ordinal=1)
        progress = SimpleNamespace(_gpu=gpu, _record=Mock(), _link=Mock(), _inbox=inbox)
        thread = Thread(target=Progress._run_thread, args=[progress])
        thread.start()
        thread.join()
    assert seen == [1]


def run(name, **options):
    with fakes.installed(lazy=True, ipc_within=True, **options), tensors.cuda():
        ranks.run_ranks(SIZE, lambda link: BODIES[name](on_gpus(over_threads(link))), timeout_s=20)


@pytest.mark.parametrize("schedule", [{}, {"seed": 1}], ids=["late", "random"])
@pytest.mark.parametrize("name", BODIES)
def test_tensors_of_cuda(name, schedule):
    run(name, **({"seed": None} if name == "overlap" else schedule))


#: The order that a row needs -> where it is made, and what is there without
ORDERS = {
    "stream that waits": ("operations.own_stream", caller_stream),
    "scratch": ("operations.own_stream", caller_stream),
    f"means, {torch.float32}, always": (
        "gradient_sync.gradient_plane.caller_stream", lambda x: nullcontext(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_a_missing_order_is_found(monkeypatch, name):
    """Whatever the schedule: the sums may be right."""
    path, without = ORDERS[name]
    monkeypatch.setattr(f"hpctrain.torch.{path}", without)
    monkeypatch.setattr(ranks, "GRACE_S", 0)
    for seed in (None, 0, 1):
        with pytest.raises(RaceError):
            run(name, seed=seed)


#: By way of C++, as scripts call: under MPI, which crashes on the pointers of this machine.
SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import fakes, torch, torch.distributed as dist
from fakes import tensors
from hpctrain.transport.device import gpus

with fakes.installed(lazy=True, hidden=True) as machine, tensors.cuda():
    gpus.driver_cuda_version = lambda: machine.driver
    dist.init_process_group("hpctrain")
    rank, group, side = dist.get_rank(), dist.group.WORLD, torch.cuda.Stream()
    x, y = (tensors.on_cuda(torch.full((1000,), value)) for value in (rank + 1.0, 0.0))
    with torch.cuda.stream(side):
        x.mul_(2)
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert (x.clone().cpu() == 6).all(), x.cpu()
    with torch.cuda.stream(side):
        x.mul_(rank + 1)
        works = [group.send([x], 1 - rank, 0), group.recv([y], 1 - rank, 0)]
    for work in works:
        work.wait()
    assert (y.clone().cpu() == 6 * (2 - rank)).all(), y.cpu()
    dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_process_group_under_mpi(start):
    tests = Path(__file__).parents[1]
    script = SCRIPT.format(folders=[str(tests), str(tests / "lib")])
    ended = start("-c", script, ranks=2).finish(timeout=100)
    assert ended.returncode == 0, ended.stderr
