"""NCCL against a stand-in for CuPy: ids, sizes, dtypes, operations, and the error without it.

No GPU is needed, so this shows the calls that are made, not that they work on one.
"""

from __future__ import annotations

import sys
from threading import Barrier, Lock, local
from types import ModuleType, SimpleNamespace

import fakes
import numpy as np
import pytest
from ranks import on_gpus, run_on

from hpctrain import collectives, engines, nn, optim
from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.gradients.replica import Batch, ModelReplica
from hpctrain.training import recipe
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.tuning.select import find_allreduce
from hpctrain.world import over_threads

ID = bytes(range(128, 256))
CONSTANTS = {"NCCL_SUM": 0, "NCCL_PROD": 1, "NCCL_MAX": 2, "NCCL_MIN": 3, "NCCL_INT8": 0,
             "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_INT64": 4, "NCCL_FLOAT32": 7,
             "NCCL_FLOAT64": 8}  # fmt: skip
UFUNCS = {0: np.add, 1: np.multiply, 2: np.maximum, 3: np.minimum}
KINDS = {0: np.int8, 1: np.uint8, 2: np.int32, 4: np.int64, 7: np.float32, 8: np.float64}


class DeviceArray:
    """A copy in memory that only pointers lead to."""

    def __init__(self, x, memory, device=0):
        self._x, self.size, self.dtype = x.copy(), x.size, x.dtype
        self.data = SimpleNamespace(ptr=id(self._x), device_id=device)
        memory[self.data.ptr] = self._x

    def get(self, stream, out):
        out[...] = self._x


class Cuda:
    """What a job's ranks share: the stand-in for the GPUs and for NCCL's network."""

    def __init__(self, ranks: int, devices: int):
        self.memory, self.joined, self.calls = {}, {}, []
        self.barrier, self.lock, self.devices = Barrier(ranks), Lock(), devices
        self.ids, self.here = 0, local()

    def get_unique_id(self):
        self.ids += 1
        return ID

    def communicator(self, size, shared, rank):
        assert shared == ID and 0 <= rank < size == self.barrier.parties
        return SimpleNamespace(allReduce=lambda *call: self.allreduce(rank, *call))

    def allreduce(self, rank, source, target, count, kind, op, stream):
        x = self.memory[source]
        assert source == target and count == x.size and x.dtype == KINDS[kind] and stream == 77
        self.joined[rank] = x.copy()
        self.barrier.wait(10)
        rows = [self.joined[r] for r in sorted(self.joined)]
        total = UFUNCS[op].reduce(rows, axis=0, dtype=x.dtype)
        self.barrier.wait(10)
        x[...] = total
        self.calls.append((rank, count))

    def modules(self) -> dict[str, ModuleType]:
        """Return the modules that Python is to find."""
        cupy, cuda, nccl = (ModuleType(n) for n in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
        vars(nccl).update(CONSTANTS)
        nccl.get_unique_id, nccl.NcclCommunicator = self.get_unique_id, self.communicator
        cuda.Device, cuda.Stream, cuda.nccl = Device, Stream, nccl
        cuda.runtime = SimpleNamespace(
            getDeviceCount=self.count, CUDARuntimeError=OSError, deviceGetPCIBusId=self.address
        )
        cuda.get_current_stream = lambda: SimpleNamespace(ptr=77, done=True)
        cupy.cuda, cupy.ndarray = cuda, DeviceArray
        cupy.asarray = lambda x: DeviceArray(x, self.memory)
        return {m.__name__: m for m in (cupy, cuda, nccl)}

    def count(self):
        if self.devices is None:
            raise OSError("no driver")
        return self.devices

    def address(self, device):
        """Return where a rank's device is; of those before `here.first` it sees none."""
        return f"0000:{device + getattr(self.here, 'first', 0)}:00"


class Device:
    used: set[int] = set()  # noqa: RUF012  (one stand-in for all tests)

    def __init__(self, number):
        self.used.add(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Stream(Device):
    ptr = 77

    def __init__(self, non_blocking):
        assert non_blocking

    def synchronize(self):
        pass


@pytest.fixture
def cuda(monkeypatch):
    def install(ranks: int, devices: int | None) -> Cuda:
        result = Cuda(ranks, devices)
        for name, module in result.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        Device.used.clear()
        return result

    return install


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "int8", "uint8"])
def test_sums_over_ranks(cuda, dtype, op):
    fake = cuda(3, 4)
    ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]

    def body(world):
        function, group = find_allreduce("nccl"), world.main
        for n in (1, 100, 0):
            x = (np.arange(n) * (world.rank + 1) - 40).astype(dtype)
            function(group, x, collectives.operation(op, x.dtype))
            rows = [(np.arange(n) * (r + 1) - 40).astype(dtype) for r in range(3)]
            assert (x == ufunc.reduce(rows, axis=0, dtype=dtype)).all()

    run_on("threads", 3, body)
    assert fake.ids == 1  # one communicator for all calls, of rank 0's id
    assert sorted(fake.calls) == [(r, n) for r in range(3) for n in (1, 100)]
    assert Device.used == {0, 1, 2}


def test_arrays_of_a_gpu_stay_there(cuda):
    """And each rank's own GPU is taken, whatever its number is."""
    fake = cuda(3, 4)

    def body(world):
        host = np.arange(100, dtype=np.float32) * (world.rank + 1)
        x = DeviceArray(host, fake.memory, device=3 - world.rank)
        find_allreduce("nccl")(world.main, x, np.add)
        assert (x._x == np.arange(100) * 6).all()

    run_on("threads", 3, body)
    assert Device.used == {1, 2, 3} and len(fake.calls) == 3


def test_ranks_on_one_gpu_are_refused_by_all(cuda):
    fake = cuda(2, 2)

    def body(world):
        x = DeviceArray(np.ones(4, np.float32), fake.memory)
        with pytest.raises(UsageError, match="a GPU for each rank, seen a node with 1 fewer"):
            find_allreduce("nccl")(world.main, x, np.add)

    run_on("threads", 2, body)


def replica() -> ModelReplica:
    return ModelReplica(nn.MlpOptions(widths=[4, 3, 2]).build((4,), 2), 0, np.dtype("float32"))


def test_an_engine_sums_by_it(cuda):
    fake = cuda(2, 2)

    def body(world):
        engine = engines.AllReduce(algorithm="nccl").build(world, replica(), optim.sgd(0.1))
        batch = Batch.of(np.full((2, 4), world.rank, np.float32), np.array([0, 1]))
        engine.step(engines.Task(batch, 0.25, nn.Key(0, 0, 0)), engines.Flags())
        engine.close()
        return engine.replica.arena

    first, second = run_on("threads", 2, body)
    assert (first.grad == second.grad).all() and first.grad.any()
    assert len(fake.calls) == 2


def test_ranks_that_see_one_gpu_each_have_one_each(cuda):
    fake = cuda(3, 1)

    def body(world):
        fake.here.first = world.rank
        x = np.full(4, world.rank, np.float32)
        find_allreduce("nccl")(world.main, x, np.add)
        assert (x == 3).all()

    run_on("threads", 3, body)
    assert Device.used == {0}  # each one's own


@pytest.mark.parametrize("devices", [(1, 0), (0, 0)])
def test_an_engine_takes_the_gpu_of_its_arrays(monkeypatch, devices):
    """Whatever the rank's place in its node; two that share one are refused though two are seen."""
    nccl, created = ModuleType("cupy.cuda.nccl"), {}
    nccl.get_unique_id = lambda: ID
    with fakes.installed(devices=2) as machine:
        import cupy

        nccl.NcclCommunicator = lambda _, shared, rank: created.update({rank: machine.device})
        monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)

        def body(world):
            cupy.cuda.Device(devices[world.rank]).use()
            world = on_gpus(world, gpus="".join(map(str, devices)))
            own = ModelReplica(replica().model, 0, np.float32, on_gpu=True)
            try:
                engines.AllReduce(algorithm="nccl").build(world, own, optim.sgd(0.1)).close()
            except UsageError as error:
                return str(error)
            return ""

        message = run_on("threads", 2, body)
    if len(set(devices)) == 2:
        assert message == ["", ""] and created == dict(enumerate(devices))
    else:
        assert all("seen a node with 1 fewer" in item for item in message) and not created


def test_what_nccl_would_round_in_its_own_way_is_refused(cuda):
    cuda(1, 1)

    def body(world):
        x = np.ones(4, np.float16)
        with pytest.raises(UsageError, match="no arrays of float16"):
            find_allreduce("nccl")(world.main, x, collectives.operation("sum", x.dtype))

    run_on("threads", 1, body)


def test_more_ranks_than_gpus_are_refused_by_all(cuda):
    cuda(3, 2)

    def body(world):
        with pytest.raises(UsageError, match="a GPU for each rank, seen a node with 1 fewer"):
            engines.AllReduce(algorithm="nccl").build(world, replica(), optim.sgd(0.1))

    run_on("threads", 3, body)


@pytest.mark.parametrize("devices", [0, None])
def test_no_gpu_is_said_before_anything_starts(cuda, devices):
    cuda(1, devices)
    with pytest.raises(UsageError, match="CUDA sees none here"):
        recipe.load("digits", ["wire.algorithm=nccl"])


def test_no_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[cuda12x\]'"):
        recipe.load("digits", ["wire.algorithm=nccl"])


def test_cupy_without_nccl_names_it(cuda, monkeypatch):
    cuda(1, 1)
    monkeypatch.setattr(sys.modules["cupy.cuda"], "nccl", SimpleNamespace(available=False))
    with pytest.raises(UsageError, match=r"nvidia-nccl-cu12.*NcclCommunicator"):
        find_allreduce("nccl")


class Kernels(Cuda):
    """A stand-in whose kernels wait for all ranks of their communicator, in their streams."""

    def __init__(self, ranks: int):
        super().__init__(ranks, ranks)
        self.joined_kernels, self.streams, self.aborted = {}, {}, []

    def get_unique_id(self):
        self.ids += 1
        return bytes([self.ids]) + ID[1:]

    def communicator(self, size, shared, rank):
        return KernelCommunicator(self, size, shared, rank)

    def modules(self):
        result = super().modules()
        fake = self

        class PolledStream(Stream):
            def __init__(self, non_blocking):
                super().__init__(non_blocking)
                self.ptr = id(self)

            @property
            def done(self):
                kernel = fake.streams.get(self.ptr)
                return kernel is None or kernel()

        result["cupy.cuda"].Stream = PolledStream
        return result


class KernelCommunicator:
    """One rank's communicator: calls return at once, and the sum is complete in its stream."""

    def __init__(self, fake, size, shared, rank):
        self.fake, self.size, self.shared, self.rank, self.calls = fake, size, shared, rank, 0

    def allReduce(self, source, target, count, kind, op, stream):
        self.calls += 1
        with self.fake.lock:
            rows = self.fake.joined_kernels.setdefault((self.shared, self.calls), {})
        x, size = self.fake.memory[source], self.size
        rows[self.rank] = x.copy()

        def is_complete():
            if len(rows) < size:
                return False
            x[...] = UFUNCS[op].reduce(list(rows.values()), axis=0, dtype=x.dtype)
            return True

        self.fake.streams[stream] = is_complete

    def abort(self):
        self.fake.aborted.append((self.shared[0], self.rank))


@pytest.mark.parametrize("call", [-2, -3, -20, -21])  # counted from the end of an undisturbed run
def test_a_loss_ends_the_wait_for_a_kernel_and_the_ranks_left_join_another(monkeypatch, call):
    ends: dict[int, int] = {}

    def body(link):
        world = over_threads(link)
        for _ in range(40):
            while True:
                x = np.ones(4, np.float32)
                try:
                    find_allreduce("nccl")(world.main, x, np.add)
                    world.link.endpoint.survivors.agree()
                    break
                except LostRankError:
                    world.membership.renew()
            assert (x == world.size).all()
        ends[link.rank] = link.hub.job.calls[link.rank]
        return world.size

    def run(kills):
        fake = Kernels(3)
        for name, module in fake.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        return fake, run_ranks(3, body, 10.0, kills)

    assert run({1: 10**9})[1] == [3, 3, 3]
    fake, sizes = run({1: ends[1] + call})
    assert sizes == [2, None, 2]
    assert fake.ids == 2
    assert {(1, 0), (1, 2)} <= set(fake.aborted)  # each of those left, of the first communicator
    assert len(set(fake.aborted)) == len(fake.aborted)
