"""The choice of a rank's GPU, the cores near it, refusals: with simulated CuPy and driver."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import fakes
import pytest
from machines import pci_device
from ranks import on_ranks

from hpctrain import world as worlds
from hpctrain.collectives import all_gather_bytes
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import SINGLE_RANK, Launched
from hpctrain.transport.device import gpus
from hpctrain.transport.device.gpus import Gpu, GpuCores, choose_gpu, gpu_cores
from hpctrain.transport.gpu_probe import decision, verdicts, verify
from hpctrain.transport.paths import STAGED_VERDICT, RankPlace, Verdict
from hpctrain.transport.placement import core_binding, rank_placement
from hpctrain.transport.placement.check import RankBinding


def rank(local_rank, local_size, rank=0, size=8):
    return Launched("srun", rank, size, local_rank, local_size)


MIG = ("MIG-1", "MIG-2")
# launched, visible, CUDA_VISIBLE_DEVICES -> number, a word of the note
CHOICES = {
    "alone": (SINGLE_RANK, 4, (), 0, "one of 4"),
    "one each": (rank(3, 4), 4, (), 3, "one of 4 visible, taken in turn"),
    "narrowed by the site": (rank(3, 4), 1, ("3",), 0, "the only one visible"),
    "a subset": (rank(1, 2), 2, ("2", "3"), 1, "one of 2"),
    "shared": (rank(5, 8), 4, (), 1, "8 ranks share 4 GPUs"),
    "MIG": (rank(1, 2), 1, ("MIG-2",), 0, "the only one visible"),
    "several MIG": (rank(1, 2), 1, MIG, 0, "the first of 2 MIG slices"),
    "local rank unknown": (rank(None, None, rank=5), 4, (), 1, "sets no local rank"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choice(case):
    launched, visible, listed, ordinal, word = CHOICES[case]
    choice = choose_gpu(launched, visible, listed)
    assert choice.ordinal == ordinal
    assert word in choice.note


def test_no_gpu_to_choose():
    with pytest.raises(UsageError, match=r"no GPU is visible \(CUDA_VISIBLE_DEVICES is -1\)"):
        choose_gpu(SINGLE_RANK, 0, ("-1",))


REMAINING, RIGHT = frozenset(range(4)), frozenset(range(4, 8))
# launched, number of the GPU, cores near each visible GPU -> what is near
NEARBY = {
    "two sockets": (rank(3, 4), 3, [REMAINING, REMAINING, RIGHT, RIGHT], GpuCores(RIGHT, 1, 2)),
    "shared GPUs": (rank(2, 4), 0, [REMAINING, RIGHT], GpuCores(REMAINING, 1, 2)),
    "narrowed": (rank(2, 4), 0, [RIGHT], GpuCores(RIGHT, None, 4)),
    "not told": (rank(1, 2), 1, [frozenset(), frozenset()], None),
    "local rank unknown": (rank(None, None), 0, [REMAINING, RIGHT], None),
}


@pytest.mark.parametrize("case", NEARBY)
def test_near(case):
    launched, ordinal, cores, expected = NEARBY[case]
    assert gpu_cores(launched, ordinal, cores) == expected


EIGHT = tuple(range(8))
# near, allowed -> cores, BLAS threads, a word
BLOCKS = {
    "first there": (GpuCores(RIGHT, 0, 2), EIGHT, (4, 5), 2, "2 of 4 cores near its GPU"),
    "second there": (GpuCores(RIGHT, 1, 2), EIGHT, (6, 7), 2, "2 of 4 cores near its GPU"),
    "place unknown": (GpuCores(RIGHT, None, 4), EIGHT, (4, 5, 6, 7), 2, "all 4 cores near its GPU"),
    "too many there": (GpuCores(RIGHT, 4, 5), EIGHT, (2, 3), 2, "took 2 of 8"),
    "bound": (GpuCores(RIGHT, 0, 2), (1,), (1,), 1, "bound by the launcher"),
    "cores of another cpuset": (GpuCores(frozenset({9}), 0, 1), EIGHT, (2, 3), 2, "took 2 of 8"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_block_near_the_gpu(case):
    gpu_cores, allowed, cores, threads, word = BLOCKS[case]
    plan = core_binding.plan_binding(rank(1, 4), set(allowed), EIGHT, {}, gpu_cores)
    assert (plan.cores, plan.blas_threads) == (cores, threads)
    assert word in plan.note


# ---- with a made-up CuPy ----


class CUDARuntimeError(RuntimeError):
    pass


class Cupy:
    """Stands in for CuPy: `count` GPUs, or an exception; made for CUDA 13."""

    def __init__(self, count):
        self.count, self.used = count, []
        self.cuda = SimpleNamespace(runtime=self, Device=self.device)

    CUDARuntimeError = CUDARuntimeError

    def getDeviceCount(self):
        if isinstance(self.count, Exception):
            raise self.count
        return self.count

    def runtimeGetVersion(self):
        return 13000

    def deviceGetPCIBusId(self, ordinal):
        return f"0000:{0x13 + ordinal:02X}:00.0"

    def device(self, ordinal):
        return SimpleNamespace(use=lambda: self.used.append(ordinal), compute_capability="90")


@pytest.fixture
def machine(monkeypatch):
    """Pretend a CuPy of `count` GPUs and a driver of that CUDA version, None for no driver."""

    def pretend(count, driver=13000):
        cupy = Cupy(count)
        monkeypatch.setattr(gpus, "import_cupy", lambda: cupy)
        monkeypatch.setattr(gpus, "find_spec", lambda name: cupy)
        monkeypatch.setattr(gpus, "driver_cuda_version", lambda: driver)
        monkeypatch.setattr(gpus, "_query_uuid", lambda ordinal, words: f"GPU-{ordinal}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return cupy

    return pretend


def test_a_seat_has_a_gpu_and_cores_near_it(machine, monkeypatch, tmp_path):
    cupy, bound = machine(2), []
    for n in ("13", "14"):
        pci_device(tmp_path, f"pci0000:{'10' if n == '13' else '80'}/0000:{n}:00.0")
    cores = {address: rank_placement.pci.near_cores(address, tmp_path) for address in
             ("0000:13:00.0", "0000:14:00.0")}  # fmt: skip
    monkeypatch.setattr(rank_placement.pci, "near_cores", cores.get)
    monkeypatch.setattr(rank_placement, "bind_process", lambda launched, gpu_cores:
        bound.append(gpu_cores) or SimpleNamespace(note=""))  # fmt: skip
    result = rank_placement.place_rank(rank(1, 2), "auto")
    assert (str(result.gpu), result.gpus, cupy.used) == ("gpu 1, GPU-1", 2, [1])
    assert bound == [GpuCores(RIGHT, 0, 1)]


def test_cpu_asks_for_no_gpu(machine):
    machine(CUDARuntimeError("not to be called"))
    assert gpus.visible_gpus("cpu") == ()


NOT_THERE = CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
# what CuPy says, driver -> words of the refusal
REFUSED = {
    "no driver": (CUDARuntimeError("cudaErrorInsufficientDriver"), None,
                  ["no NVIDIA driver", "hpctrain doctor"]),
    "older driver": (CUDARuntimeError("cudaErrorInsufficientDriver"), 12040,
                     ["made for CUDA 13", "brings 12.4", "hpctrain[cuda12x]"]),
    "all hidden": (NOT_THERE, 13000, ["no CUDA-capable device", "hpctrain doctor"]),
    "none": (0, 13000, ["no GPU is visible"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_gpu_that_is_not_to_be_had(machine, case):
    answer, driver, words = REFUSED[case]
    machine(answer, driver)
    with pytest.raises(UsageError) as error:
        gpus.visible_gpus("gpu")
    assert [word for word in words if word not in str(error.value)] == []
    assert gpus.visible_gpus("auto") == ()


def test_without_cupy_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(gpus, "driver_cuda_version", lambda: 12040)
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UsageError, match=r"hpctrain\[cuda12x\]"):
        gpus.visible_gpus("gpu")


def _driver_of(*capabilities):
    """Return a driver's library, with a GPU for each compute capability."""

    def get_count(count):
        count._obj.value = len(capabilities)

    def get_attribute(value, attribute, device):
        value._obj.value = divmod(capabilities[device], 10)[attribute - 75]

    return SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGetCount=get_count, cuDeviceGetAttribute=get_attribute
    )


@pytest.mark.parametrize("capabilities, extra", [((70,), 12), ((90, 70), 12), ((75, 100), 13)])
def test_a_gpu_older_than_the_compiler_of_cuda_13(monkeypatch, capabilities, extra):
    """A driver for CUDA 13 serves Volta; CUDA 13's compiler does not."""
    monkeypatch.setattr(gpus, "driver_cuda_version", lambda: 13000)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: _driver_of(*capabilities))
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "cupy", None)
        with pytest.raises(UsageError, match=rf"hpctrain\[cuda{extra}x\]"):
            gpus.use_gpu(0)


@pytest.mark.parametrize("capability", ["70", "75"])
def test_a_gpu_for_which_cupy_compiles_nothing_is_refused(gpu, monkeypatch, capability):
    monkeypatch.setattr(fakes.cuda.Device, "compute_capability", capability)
    refusal = r"GPU 0 has compute capability 7.0, .* 7.5 and newer: .*cuda13x; .*hpctrain\[cuda12x"
    with pytest.raises(UsageError, match=refusal) if capability == "70" else nullcontext():
        gpus.use_gpu(0)


@pytest.mark.parametrize("variable, count", [("", 1), ("4", 4), ("none", 1)])
def test_slurm_tells_of_gpus_that_a_rank_does_not_see(variable, count):
    assert gpus.job_gpu_count({"SLURM_GPUS_ON_NODE": variable}, 1) == count


def test_names(monkeypatch):
    assert gpus._query_uuid(1, ("0", "MIG-abc")) == "MIG-abc"
    assert gpus.parse_visible_devices({"CUDA_VISIBLE_DEVICES": " 0, GPU-1,"}) == ("0", "GPU-1")


ON_CORE_0 = core_binding.Binding((0,), 1, "", 2)


def placed_on(world, gpu=True):
    local = rank_placement.Placement(rank(0, 2), ON_CORE_0, Gpu(0, "GPU-x", "") if gpu else None, 2)
    return rank_placement.exchange_placements(
        world.link, lambda data: all_gather_bytes(world.link, data), "a", local
    )


@on_ranks(2, mpi=(2,))
def test_all_know_the_placement_of_all(ranks, caplog, monkeypatch, gpu):
    way = Verdict("cuda-aware", "ipc", "staged", "so it was told")
    remembered = lambda environ: decision.ProbeResult(way, unproven=("across",))  # noqa: E731
    monkeypatch.setattr(verdicts, "cached_result", remembered)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        results = ranks(
            lambda world: (placed_on(world), world.rank, world.link.endpoint.traffic.paths)
        )
    for (places, verdict, seats), rank, paths in results:
        assert places == (RankPlace("a", "GPU-x"),) * 2
        assert seats == (RankBinding("a", "srun", 0, "0", 2, 1, "GPU-x", 2),) * 2
        assert verdict.same_gpu == "cuda-aware"
        assert paths in (("cuda-aware",) * 2, ("staged",) * 2)  # threads have no MPI
        assert rank or "share GPU-x of a" in caplog.text
    assert len(caplog.records) == any(rank == 0 for _, rank, _ in results)


@on_ranks(2, mpi=(2,))
def test_an_override_that_makes_no_sense_is_refused_by_all(ranks, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_GPU_PATH", "magic")

    def body(world):
        with pytest.raises(UsageError, match="HPCTRAIN_GPU_PATH: expected one of gdr"):
            placed_on(world)

    ranks(body)


@on_ranks(2, mpi=(2,))
def test_where_nobody_has_a_gpu_nothing_changes(ranks, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_GPU_PATH", "cuda-aware")
    for verdict, paths in ranks(
        lambda world: (placed_on(world, gpu=False)[1], world.link.endpoint.traffic.paths)
    ):
        assert (verdict, paths) == (STAGED_VERDICT, ())


def bitten(link):
    """Corrupt messages that `link` receives by pointer, as under a wrong verdict."""
    honest = link.sendrecv

    def sendrecv(x, to, inbox, source):
        honest(x, to, inbox, source)
        if xp.on_device(inbox):
            inbox[inbox.size - 1] = 0

    link.sendrecv = sendrecv
    return link


@on_ranks(2, 3, mpi=(2, 3))
def test_a_path_on_which_other_bytes_arrive_is_given_up(ranks, caplog, gpu):
    wrong = Verdict("cuda-aware", "cuda-aware", "staged", "so it was told")

    def body(world):
        gather = lambda data: all_gather_bytes(world.link, data)  # noqa: E731
        places = [RankPlace("a", f"G{rank}") for rank in range(world.size)]
        assert verify.verify_paths(world.link, gather, places, wrong) == wrong
        return (
            verify.verify_paths(bitten(world.link), gather, places, wrong),
            world.link.endpoint.traffic.paths,
            world.rank,
        )

    for verdict, paths, rank in ranks(body):
        assert (verdict.same_gpu, verdict.same_node) == ("staged", "staged")
        assert set(paths) == {"staged"}
        assert rank or "test messages by cuda-aware" in caplog.text


@on_ranks(1, 2, mpi=())
def test_a_world_without_gpus(ranks):
    for device, places in ranks(lambda world: (world.device, world.places)):
        assert device == "cpu"
        assert all(place.gpu == "" for place in places)


@pytest.mark.processes
@pytest.mark.either
def test_gpu_on_a_machine_without(start):
    if gpus.driver_cuda_version():
        pytest.skip("this machine has a GPU")
    job = start("-c", "import hpctrain; hpctrain.init('gpu')").finish()
    assert job.returncode == 2
    assert "CuPy" in job.stderr or "no NVIDIA driver" in job.stderr


def test_a_gpu_that_serves_another_process_alone(gpu, monkeypatch):
    def refuse(device):
        raise fakes.CUDARuntimeError(46, "cudaErrorDevicesUnavailable: busy or unavailable")

    monkeypatch.setattr(fakes.cuda, "setDevice", refuse)
    with pytest.raises(UsageError, match=r"GPU 0 cannot be used: cudaErrorDevices.*E. Process"):
        gpus.use_gpu(0)


def test_another_device_than_before(monkeypatch):
    running = SimpleNamespace(gpu=None, device="cpu")
    monkeypatch.setattr("hpctrain.world.process._world", running)
    assert worlds.init() is worlds.init("cpu") is running
    with pytest.raises(UsageError, match="MPI was started before, on device cpu"):
        worlds.init("gpu")
