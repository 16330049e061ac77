"""The doctor's checks on simulated machines, with planted faults and without any."""

from __future__ import annotations

import os
import resource
from dataclasses import replace

import pytest
from machines import ethernet, infiniband, juwels_booster, pci_device, write
from nvml import Nvml

from hpctrain.cluster.launch import MpiInstallation
from hpctrain.hardware.gdr import GdrState
from hpctrain.hardware.nics import Nic
from hpctrain.hardware.nvidia import GpuInfo, NodeGpus
from hpctrain.tools.doctor import mpi, node, topology
from hpctrain.tools.doctor.check import Check, exit_code
from hpctrain.tools.doctor.examine import NodeResult, find_hardware
from hpctrain.tools.doctor.mpi import LaunchReport
from hpctrain.tools.doctor.show import print_result
from hpctrain.transport.gpu_probe.decision import ProbeResult
from hpctrain.transport.gpu_probe.jobs import ProbeTrial
from hpctrain.transport.paths import Verdict
from hpctrain.transport.shared_memory.dev_shm import SHM_FOLDER, used_files


def result(checks, name):
    """Return verdict, what was seen and remedy of the check of that name."""
    check = next(check for check in checks if check.name == name)
    return check.verdict, check.seen, check.remedy


# ---- MPI ----

OPEN = MpiInstallation("Open MPI", "5.0.11", "/env/lib/libmpi.so.40", "/env/bin/mpiexec")
TWO = LaunchReport((2, 2), "MULTIPLE", True)
OWN = {"mpirun": "/env/bin/mpirun", "mpiexec": "/env/bin/mpiexec"}
REST = {"mpirun": "/usr/bin/mpirun", "mpiexec": "/env/bin/mpiexec"}
# mpi, started, on the PATH, name of the check -> verdict, a word seen, a word of the remedy
OF_MPI = {
    "right": (OPEN, TWO, OWN, "launcher", "ok", "/env/bin/mpiexec", ""),
    "wrong mpirun": (OPEN, TWO, REST, "launcher", "bad", "/usr/bin/mpirun, but Open MPI belongs",
                     "put /env/bin first"),
    "no mpiexec": (OPEN._replace(mpiexec=None), None, REST, "launcher", "bad",
                   "no mpiexec belongs", "srun"),
    "jobs of one": (OPEN, LaunchReport((1, 1), "MULTIPLE"), OWN, "ranks", "bad", "jobs of (1, 1)",
                    "must belong"),
    "does not start": (OPEN, LaunchReport((), fault="exit code 1: no slots"), OWN, "ranks", "bad",
                       "no slots", "/env/bin/mpiexec -n 2 python -m hpctrain.transport.mpi.hello"),
    "no room": (OPEN, LaunchReport((), fault="exit code 7: Bus error (signal 7)"),
               OWN, "ranks", "bad",
                "signal 7", "see `shared memory`"),
    "ranks": (OPEN, TWO, OWN, "ranks", "ok", "2 ranks", ""),
    "threads": (OPEN, TWO, OWN, "threads", "ok", "MULTIPLE", ""),
    "no threads": (OPEN, replace(TWO, thread_level="FUNNELED"), OWN, "threads", "slow",
                   "MPI_THREAD_FUNNELED", "MPI_THREAD_MULTIPLE"),
    "ULFM": (OPEN, TWO, OWN, "ULFM", "note", "--with-ft ulfm", ""),
    "no ULFM": (OPEN, replace(TWO, ulfm=False), OWN, "ULFM", "note", "none", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_MPI)
def test_mpi(case, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    of, started, on_path, name, verdict, observed, remedy = OF_MPI[case]
    message = result(mpi.check_mpi(of, started, on_path), name)
    assert message[0] == verdict
    assert observed in message[1]
    assert remedy in message[2]


def test_lines_of_ranks_among_noise():
    line = '{"size": 2, "threads": "MULTIPLE", "ulfm": true}\n'
    assert mpi.parse_output(f"hello\n{line}{line}", 0, "") == TWO
    assert mpi.parse_output(f"x\n{line}", 1, "a\n b").fault == "exit code 1: x a b"
    assert "exit code 0" in mpi.parse_output("", 0, "").fault


def test_in_a_step_mpiexec_does_not_ask_slurm():
    """Its own srun would wait for the cores of the step."""
    batch = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1", "PATH": "/bin"}
    step = batch | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert mpi.launch_environment(step, {"A": "1"}) == {"PATH": "/bin", "A": "1"}
    assert mpi.launch_environment(batch, {}) == batch


def test_what_a_user_would_start(tmp_path):
    (tmp_path / "mpirun").touch(0o755)
    assert mpi.find_launchers(str(tmp_path)) == {"mpirun": str(tmp_path / "mpirun")}


# ---- cores and memory ----


def test_blas():
    assert node.check_blas(4, 4).verdict == "ok"
    check = node.check_blas(64, 2)
    assert (check.verdict, "64 BLAS threads on 2 cores" in check.seen) == ("bad", True)
    assert "OMP_NUM_THREADS" in check.remedy


@pytest.mark.parametrize("quota, verdict", [(None, "ok"), (0.5, "bad"), (3.9, "bad"), (4.0, "ok")])
def test_blas_under_a_quota(quota, verdict):
    check = node.check_blas(4, 64, quota)
    assert (check.verdict, "limits.cpu" in check.remedy) == (verdict, verdict == "bad")
    assert node.check_blas(1, 64, quota).verdict == "ok"  # a thread there must be


@pytest.mark.parametrize("free, verdict", [(64 << 20, "bad"), (500 << 20, "slow"), (8 << 30, "ok")])
def test_room_in_shared_memory(free, verdict, tmp_path, monkeypatch):
    monkeypatch.setattr(node.dev_shm, "free_shm_bytes", lambda folder: free)
    message = result(node.check_shared_memory(tmp_path, ()), "shared memory")
    assert message[0] == verdict
    assert (verdict == "ok") or "--shm-size" in message[2]


def test_no_shared_memory(tmp_path):
    (check,) = node.check_shared_memory(tmp_path / "none")
    assert (check.verdict, "No such file" in check.seen) == ("bad", True)


def test_left_overs_of_dead_jobs_alone(tmp_path):
    for name in ("mpich_shm_1", "mpich_shm_2", "sm_segment.x", "mine.txt"):
        (tmp_path / name).write_bytes(bytes(8192))
    in_use = {str(tmp_path / "sm_segment.x")}
    verdict, observed, remedy = result(node.check_shared_memory(tmp_path, in_use), "left-overs")
    assert verdict == "note"
    assert "2 files" in observed
    assert remedy.endswith(f": rm {tmp_path}/mpich_shm_1 {tmp_path}/mpich_shm_2")
    for number in range(3, 9):
        (tmp_path / f"mpich_shm_{number}").touch()
    remedy = result(node.check_shared_memory(tmp_path, in_use), "left-overs")[2]
    expected = rf"find {tmp_path} -maxdepth 1 -uid {os.geteuid()} \( -name 'mpich_shm_*' \) -delete"
    assert remedy.endswith(expected)
    everything = {str(file) for file in tmp_path.iterdir()}
    assert result(node.check_shared_memory(tmp_path, everything), "left-overs")[0] == "ok"


def test_open_files_are_in_use():
    file = SHM_FOLDER / f"hpctrain-{os.getpid()}"
    try:
        with open(file, "w"):
            assert str(file) in used_files()
    finally:
        file.unlink()


@pytest.mark.parametrize(
    "limit, rdma, verdict",
    [(resource.RLIM_INFINITY, True, "ok"), (8 << 20, True, "slow"), (8 << 20, False, "note")],
)
def test_memlock(limit, rdma, verdict):
    assert node.check_memlock(limit, rdma).verdict == verdict


# ---- GPUs ----

H200 = [GpuInfo(i, f"GPU-{i}a", "NVIDIA H200", f"0000:1{i}:00.0", 141 << 30) for i in range(4)]
FOUR = NodeGpus("580.65", tuple(H200), {})
CUT = NodeGpus("580.65", (replace(H200[0], slices=("MIG-1", "MIG-2")),))
VISIBLE = "CUDA_VISIBLE_DEVICES"
# cards, GPUs on the bus, environment, name of the check -> verdict, a word seen, of the remedy
OF_GPUS = {
    "all": (FOUR, 4, {}, "GPUs in sight", "ok", "all 4", ""),
    "names": (FOUR, 4, {}, "GPUs", "ok", "4 x NVIDIA H200; driver 580.65", ""),
    "not known": (NodeGpus("580.65", fault="no NVML", remedy="pip"), 4, {}, "GPUs", "bad",
                  "the driver (580.65) is loaded, but no NVML", "pip"),
    "not known of CuPy": (NodeGpus(None, fault="no NVML"), 0, {}, "CuPy", "ok", "cupy 14", ""),
    "hidden": (replace(FOUR, gpus=FOUR.gpus[:1]), 4, {}, "GPUs in sight", "slow", "1 of 4",
               "--gpu-bind=none"),
    "narrowed": (FOUR, 4, {VISIBLE: "2"}, "GPUs in sight", "note", "1 of 4", "--gpu-bind=none"),
    "empty": (FOUR, 4, {VISIBLE: ""}, "GPUs in sight", "bad", "is empty", "unset"),
    "doubled": (FOUR, 4, {VISIBLE: "0,0"}, "GPUs listed", "bad", "GPU-0a twice", "once"),
    "doubled by name": (FOUR, 4, {VISIBLE: "GPU-1,1"}, "GPUs listed", "bad", "GPU-1a twice", ""),
    "not there": (FOUR, 4, {VISIBLE: "0,7"}, "GPUs listed", "bad", "names 7", "nvidia-smi -L"),
    "slices": (CUT, 1, {VISIBLE: "MIG-2"}, "GPUs", "ok", "2 MIG slices", ""),
    "a slice": (CUT, 1, {VISIBLE: "MIG-2"}, "GPUs in sight", "ok", "MIG-2", ""),
    "a slice that is not": (CUT, 1, {VISIBLE: "MIG-3"}, "GPUs listed", "bad", "MIG-3", ""),
    "an older name": (CUT, 1, {VISIBLE: "MIG-GPU-9/1/0"}, "GPUs listed", "bad", "MIG-GPU-9", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_GPUS)
def test_gpus(case):
    cards, on_bus, environ, name, verdict, observed, remedy = OF_GPUS[case]
    message = result(node.check_gpus(cards, on_bus, "cupy 14", None, environ), name)
    assert message[0] == verdict
    assert observed in message[1]
    assert remedy in message[2]


def test_names_that_are_right():
    for words in ("0,1", "GPU-0a,2", "GPU-3"):
        names = [c.name for c in node.check_gpus(FOUR, 4, "cupy 14", None, {VISIBLE: words})]
        assert "GPUs listed" not in names
    older = {VISIBLE: "MIG-GPU-0a/1/0"}
    assert "GPUs listed" not in [c.name for c in node.check_gpus(CUT, 1, "cupy 14", None, older)]


def test_no_gpu_is_no_fault():
    (check,) = node.check_gpus(NodeGpus(), 0, None, None, {})
    assert (check.verdict, check.name) == ("note", "GPUs")


def test_without_cupy():
    message = result(node.check_gpus(FOUR, 4, None, None, {}), "CuPy")
    assert (message[0], "hpctrain[cuda12x]" in message[2]) == ("bad", True)


def test_an_mpi_that_claims_cuda_and_crashes():
    way = Verdict("ipc", "ipc", "staged", "a device pointer given to MPI: a crash")
    reported = ProbeResult(way, "take the site's build", {"same_gpu": ProbeTrial(True, False)})
    message = result(node.check_gpus(FOUR, 4, "cupy 14", reported, {}), "CUDA-aware MPI")
    assert message[0] == "slow"
    assert "a crash" in message[1]
    assert message[2] == "take the site's build"
    best = ProbeResult(Verdict("cuda-aware", "cuda-aware", "gdr", "device pointers arrived"))
    assert result(node.check_gpus(FOUR, 4, "cupy 14", best, {}), "CUDA-aware MPI")[0] == "ok"


def test_gdr():
    assert node.check_gdr(GdrState("dmabuf", available=True)).verdict == "ok"
    assert node.check_gdr(GdrState("no", "modprobe", available=False)) == Check(
        "GPUDirect RDMA", "note", "no: no", "modprobe"
    )


# ---- network and picture ----


def test_network():
    good = Nic("a:1", "InfiniBand", True, 400.0, "")
    hurt, down = replace(good, name="b:1", gbit_s=100.0), replace(good, name="c:1", active=False)
    assert [c.verdict for c in topology.check_adapters([good])] == ["ok"]
    assert result(topology.check_adapters([good, hurt]), "slow links")[1] == "b:1 100 Gbit/s"
    assert result(topology.check_adapters([good, down]), "links down")[1] == "c:1"
    assert topology.check_adapters([])[0].verdict == "note"


@pytest.mark.parametrize(
    "value, verdict, words",
    [
        ("a:1", "ok", "UCX_NET_DEVICES=a:1"),
        ("a:1,d:1", "bad", "UCX_NET_DEVICES=a:1,d:1: d:1 is not there"),
        ("c:1", "bad", "c:1 is down"),
    ],
)
def test_what_ucx_was_told(value, verdict, words, tmp_path):
    good = Nic("a:1", "InfiniBand", True, 400.0, "")
    (check,) = topology.check_named_nics(
        [good, replace(good, name="c:1", active=False)], {"UCX_NET_DEVICES": value}, tmp_path
    )
    assert (check.verdict, words in check.seen) == (verdict, True)
    assert topology.check_named_nics([good], {}, tmp_path) == []


@pytest.fixture
def root(tmp_path):
    """A node: GPU and InfiniBand behind one switch, GPU and Ethernet on the other socket."""
    for number, cores in enumerate(("0-3", "4-7")):
        write(tmp_path / f"sys/devices/system/node/node{number}", {"cpulist": cores})
    switch = "pci0000:10/0000:10:01.0/0000:11:00.0"
    pci_device(tmp_path, f"{switch}/0000:12:00.0/0000:13:00.0")
    infiniband(tmp_path, "mlx5_0", f"{switch}/0000:12:01.0/0000:14:00.0", "400 Gb/sec (4X NDR)")
    pci_device(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0")
    ethernet(tmp_path, "eno1", 25000, "pci0000:80/0000:80:02.0/0000:82:00.0")
    for address in ADDRESSES:
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
    return tmp_path


ADDRESSES = ["0000:13:00.0", "0000:81:00.0"]


PICTURE = """\
node here
  NUMA 0, cores 0-3: GPU0 NVIDIA H200 141 GiB; mlx5_0:1 InfiniBand 400 Gbit/s
  NUMA 1, cores 4-7: GPU1 NVIDIA H200 141 GiB; eno1 Ethernet 25 Gbit/s
            GPU0      GPU1      mlx5_0:1  eno1
  GPU0      X         SYS       PIX       SYS
  GPU1      SYS       X         SYS       PHB
  mlx5_0:1  PIX       SYS       X         SYS
  eno1      SYS       PHB       SYS       X
"""


def test_picture(root):
    drawn = find_hardware("here", root, Nvml(addresses=ADDRESSES))
    assert "\n".join(drawn.topology_lines).startswith(PICTURE.rstrip())
    assert drawn.gpus_on_bus == 2
    assert drawn.gdr.available is None


def test_which_adapter_is_near_which_gpu(tmp_path):
    nvml = Nvml(((),) * 4, addresses=juwels_booster(tmp_path))
    lines = find_hardware("here", tmp_path, nvml).topology_lines
    assert lines[2].startswith(
        "  NUMA 1, cores 6-11: GPU1 NVIDIA H200 141 GiB; mlx5_1:1 InfiniBand 200"
    )
    assert lines[-1] == "  near: GPU0 mlx5_0:1; GPU1 mlx5_1:1; GPU2 mlx5_2:1; GPU3 mlx5_3:1"


def test_what_is_shown(root, capsys):
    from rich.console import Console

    faults = [Check("one", "bad", "it [broke]", "mend it"), Check("two", "note", "x", "or not")]
    reported = NodeResult(
        "here", faults, find_hardware("here", root, Nvml(addresses=ADDRESSES)), None
    )
    print_result(reported, Console(width=100))
    out = capsys.readouterr().out
    assert PICTURE.splitlines()[1] in out
    assert "it [broke]" in out
    assert out.endswith("one: mend it\nbad: one\n")
    table = reported.table()
    assert table["exit_code"] == 1
    assert table["topology"]["matrix"][0][2] == "PIX"
    assert exit_code([faults[1]]) == 0
