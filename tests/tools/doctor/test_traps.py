"""Twelve traps of clusters, each planted on a simulated site, and named with cause and cure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import sites

from hpctrain.core.errors import UsageError
from hpctrain.tools.doctor.check import Check
from hpctrain.tools.doctor.job.binding import check_bindings
from hpctrain.tools.doctor.script import Machine, check_script
from hpctrain.tools.doctor.traps import Installation, check_environment
from hpctrain.transport.placement.check import RankBinding

CUDA = "2.13.0+cu129"
LOCAL, BASE = Path("/tmp/env"), Path("/usr")


def named(checks: list[Check], name: str) -> Check:
    """Return the one check of that name."""
    (check,) = [check for check in checks if check.name == name]
    return check


# site, environment, environment's and interpreter's folder, PyTorch
#   -> name and verdict of the check, words of the cause and of the cure
ENVIRONMENTS = {
    "torchrun under srun": (
        "perlmutter", sites.rank_environ("perlmutter", 0, 2, 1) | {"TORCHELASTIC_RUN_ID": "none"},
        LOCAL, BASE, None, "torchrun", "bad", "one core", "python -m hpctrain.torch",
    ),
    "GPU-aware MPI beside NCCL": (
        "alps", {"MPICH_GPU_SUPPORT_ENABLED": "1"},
        LOCAL, BASE, CUDA, "GPU-aware MPI", "note", "deadlock", "MPICH_GPU_SUPPORT_ENABLED=0",
    ),
    "GPU-aware MPI of Aurora": (
        "aurora", {"MPIR_CVAR_ENABLE_GPU": "1"},
        LOCAL, BASE, "2.13.0", "GPU-aware MPI", "note", "deadlock", "MPIR_CVAR_ENABLE_GPU=0",
    ),
    "no network plugin": (
        "frontier", {"LD_LIBRARY_PATH": "/no/such/folder"},
        LOCAL, BASE, "2.13.0+rocm6.4", "network plugin", "slow", "fall back to TCP", "aws-ofi-rccl",
    ),
    "NCCL_NET_PLUGIN with uenv": (
        "alps", {"NCCL_NET_PLUGIN": "ofi", "UENV_VIEW": "default"},
        LOCAL, BASE, CUDA, "NCCL_NET_PLUGIN", "bad", "does not start", "NCCL_NET='AWS Libfabric'",
    ),
    "memhooks": (
        "frontier", {"FI_MR_CACHE_MONITOR": "memhooks"},
        LOCAL, BASE, None, "memhooks", "bad", "deadlock", "FI_MR_CACHE_MONITOR=kdreg2",
    ),
    "memhooks by default": (
        "lumi", {}, LOCAL, BASE, None, "memhooks", "note", "is not set", "userfaultfd",
    ),
    "environment on NFS": (
        "juwels", {}, Path("/home/me/env"), BASE, None, "environment", "slow", "nfs4 (/home)",
        "sbcast",
    ),
    "environment on Lustre": (
        "frontier", {}, Path("/work/me/env"), BASE, None, "environment", "note", "lustre (/work)",
        "squashfs",
    ),
    "uv's Python outside": (
        "juwels", {}, LOCAL, Path("/home/me/.local/share/uv/python/cpython-3.12"), None,
        "interpreter", "slow", "/home/me/.local/share/uv", "UV_PYTHON_INSTALL_DIR",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", ENVIRONMENTS)
def test_traps_of_an_environment(trap, tmp_path):
    site, environ, prefix, base, torch, name, verdict, cause, cure = ENVIRONMENTS[trap]
    sites.plant_devices(tmp_path, site)
    check = named(check_environment(environ, Installation(prefix, base, torch, tmp_path)), name)
    assert check.verdict == verdict
    assert cause in check.seen and cure in check.remedy


def test_an_environment_without_traps(tmp_path):
    sites.plant_devices(tmp_path, "frontier")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/librccl-net.so").touch()
    environ = sites.rank_environ("frontier", 0, 2, 1) | {
        "LD_LIBRARY_PATH": f"/opt/rocm/lib:{tmp_path}/lib",
        "FI_MR_CACHE_MONITOR": "kdreg2",
        "MPICH_GPU_SUPPORT_ENABLED": "0",
    }
    assert check_environment(environ, Installation(LOCAL, BASE, "2.13.0+rocm6", tmp_path)) == []
    assert check_environment({}, Installation(LOCAL, BASE, CUDA, tmp_path / "no")) == []


def test_ranks_on_one_core():
    """As where srun gives a task one core, and torchrun starts ranks in it."""
    binding = RankBinding("n1", "srun", 0, "0", offered=8, blas_threads=1)
    bindings = [replace(binding, local_rank=rank) for rank in range(4)]
    check = named(check_bindings(bindings), "cores shared")
    assert check.verdict == "bad"
    assert "core" in check.seen and "--cpus-per-task" in check.remedy


# site, environment, script -> name and verdict of the check, words of the cause and of the cure
SCRIPTS = {
    "torchrun under srun": (
        "frontier", {}, "#SBATCH -N 2\nsrun -N 2 \\\n  torchrun --nproc-per-node 8 train.py",
        "torchrun", "bad", "`torchrun` under srun", "python -m hpctrain.torch",
    ),
    "torch before mpi4py": (
        "frontier", {}, "import torch\nfrom mpi4py import MPI",
        "imports", "bad", "line 1 imports torch before line 2", "import mpi4py first",
    ),
    "GPU-aware MPI beside NCCL": (
        "alps", {"MPICH_GPU_SUPPORT_ENABLED": "1"},
        "import torch.distributed as dist\ndist.init_process_group(backend='cpu:gloo,cuda:nccl')",
        "GPU-aware MPI", "slow", "line 2 uses NCCL", "MPICH_GPU_SUPPORT_ENABLED=0",
    ),
    "HDF5 with fork": (
        "juwels", {}, "import h5py\nloader = DataLoader(data, num_workers=4)",
        "forked workers", "bad", "line 1 imports h5py", "forkserver",
    ),
    "Zarr with fork": (
        "juwels", {}, "import zarr.storage\nloader = torch.utils.data.DataLoader(d, num_workers=n)",
        "forked workers", "bad", "imports zarr", "forkserver",
    ),
    "devices after MPI": (
        "perlmutter", {}, "from mpi4py import MPI\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'",
        "CUDA_VISIBLE_DEVICES", "bad", "line 2 sets it after line 1", "set_device(local_rank)",
    ),
    "devices after ht.init": (
        "perlmutter", {}, "ht.init()\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', '0')",
        "CUDA_VISIBLE_DEVICES", "bad", "line 1 (ht.init)", "before MPI starts",
    ),
    "tracker without network": (
        "juwels", {}, "import wandb\nwandb.init(project='x')",
        "tracker", "bad", "no route", "WANDB_MODE=offline",
    ),
    "tracker to a server": (
        "juwels", {"MLFLOW_TRACKING_URI": "https://mlflow"}, "import mlflow",
        "tracker", "bad", "no route", "MLFLOW_TRACKING_URI=file:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", SCRIPTS)
def test_traps_of_a_script(trap, tmp_path, monkeypatch):
    monkeypatch.setattr("hpctrain.tools.doctor.script._FORK_IS_DEFAULT", True)
    site, environ, text, name, verdict, cause, cure = SCRIPTS[trap]
    sites.plant_devices(tmp_path, site)
    path = tmp_path / ("train.sbatch" if text.startswith("#") else "train.py")
    path.write_text(text)
    check = named(check_script(str(path), Machine(environ, tmp_path)), name)
    assert check.verdict == verdict
    assert cause in check.seen and cure in check.remedy


#: site, environment, script
RIGHT = {
    "mpi4py first": ("frontier", {}, "from mpi4py import MPI\nimport torch"),
    "torch first on InfiniBand": ("juwels", {}, "import torch\nfrom mpi4py import MPI"),
    "NCCL alone": ("alps", {}, "dist.init_process_group('nccl')"),
    "another backend": (
        "alps",
        {"MPICH_GPU_SUPPORT_ENABLED": "1"},
        "dist.init_process_group('hpctrain')",
    ),
    "no workers": ("lumi", {}, "import h5py\nDataLoader(data, num_workers=0)\nDataLoader(data)"),
    "forkserver": (
        "lumi",
        {},
        "import h5py\nDataLoader(d, num_workers=2, multiprocessing_context='forkserver')",
    ),
    "spawn for all": ("lumi", {}, "import zarr\nset_start_method('spawn')\nDataLoader(d, 2)"),
    "devices before MPI": (
        "alps",
        {},
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'\nfrom mpi4py import MPI",
    ),
    "offline by variable": ("juwels", {"WANDB_MODE": "offline"}, "import wandb"),
    "offline by argument": ("juwels", {}, "import wandb\nwandb.init(mode='offline')"),
    "offline by the script": ("juwels", {}, "os.environ['WANDB_MODE'] = 'offline'\nimport wandb"),
    "srun alone": ("alps", {}, "#!/bin/bash\n# no torchrun under srun\nsrun python train.py"),
    "an option": ("alps", {}, "#!/bin/bash\nsrun python deepspeed.py --deepspeed x.json"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_scripts_without_traps(case, tmp_path):
    site, environ, text = RIGHT[case]
    sites.plant_devices(tmp_path, site)
    path = tmp_path / ("train.sbatch" if text.startswith("#") else "train.py")
    path.write_text(text)
    (check,) = check_script(str(path), Machine(environ, tmp_path))
    assert (check.name, check.verdict) == ("script", "ok")


def test_a_route_is_no_promise(tmp_path):
    """Inside a job a note says that compute nodes may have no way to a tracker's server."""
    sites.plant_devices(tmp_path, "juwels")
    with (tmp_path / "proc/net/route").open("a") as table:
        table.write("eth0\t00000000\t0101A8C0\n")
    script = tmp_path / "train.py"
    script.write_text("import wandb")
    (check,) = check_script(str(script), Machine({"SLURM_JOB_ID": "1"}, tmp_path))
    assert (check.name, check.verdict) == ("tracker", "note")
    (check,) = check_script(str(script), Machine({}, tmp_path))
    assert check.verdict == "ok"


@pytest.mark.parametrize("text", ["def broken(:", "\0"])
def test_what_is_no_script_is_refused(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"train\.py: expected Python"):
        check_script(str(path), Machine({}, tmp_path))
    with pytest.raises(UsageError, match=r"no\.py"):
        check_script(str(tmp_path / "no.py"), Machine({}, tmp_path))
