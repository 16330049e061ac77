"""Six sites as data: names of nodes and interfaces, devices, and what launchers set for a rank.

`sites.py NAME PROGRAM ARGS` becomes PROGRAM with the environment of a rank at that site: numbers
are those that a real launcher of this machine gave, whose own variables are taken away.

Sources, public: docs.olcf.ornl.gov (Frontier user guide); argonne-lcf/user-guides (docs/aurora) and
job scripts of its users; eth-cscs/cscs-docs; docs.nersc.gov; Lumi-supercomputer/lumi-userguide;
apps.fz-juelich.de (JUWELS, JUPITER). None of it was recorded there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machines import ethernet, write


@dataclass(frozen=True)
class Site:
    """Two nodes of a site."""

    hosts: tuple[str, str]  #: as `hostname` prints them
    launcher: str  #: a key of launchers.TITLES
    node_list: str  #: of both nodes, as the scheduler writes it
    fast: tuple[str, ...] = ("hsn0", "hsn1", "hsn2", "hsn3")  #: interfaces of the fast network
    slow: str = "nmn0"  #: the interface of the administrators' network, which has the host's name
    pmi: str = "cray"  #: what srun sets beside Slurm's variables
    environ: Mapping[str, str] = field(default_factory=dict)  #: of its modules and scheduler


SITES = {
    "frontier": Site(
        ("frontier00123", "frontier00124"), "srun", "frontier[00123-00124]",
        environ={"LMOD_SYSTEM_NAME": "frontier", "SLURM_CLUSTER_NAME": "frontier"},
    ),
    "aurora": Site(
        ("x4102c0s0b0n0", "x4102c0s1b0n0"), "pals", "",
        tuple(f"hsn{number}" for number in range(8)), "bond0",
        environ={
            "PBS_JOBID": "4711.aurora-pbs-0001.hostmgmt.cm.aurora.alcf.anl.gov",
            "PBS_ENVIRONMENT": "PBS_BATCH", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        },
    ),
    "alps": Site(
        ("nid005471", "nid005487"), "srun", "nid[005471,005487]",
        environ={"SLURM_CLUSTER_NAME": "daint", "UENV_VIEW": "/user-environment:gnu:default"},
    ),
    "perlmutter": Site(
        ("nid001234", "nid001235"), "srun", "nid[001234-001235]",
        environ={"NERSC_HOST": "perlmutter", "SLURM_CLUSTER_NAME": "perlmutter"},
    ),
    "lumi": Site(
        ("nid007955", "nid007956"), "srun", "nid[007955-007956]",
        environ={"SLURM_CLUSTER_NAME": "lumi"},
    ),
    "juwels": Site(
        ("jwb0001.juwels", "jwb0002.juwels"), "srun", "jwb[0001-0002]",
        ("ib0", "ib1", "ib2", "ib3"), "eth0", "parastation",
        environ={"SYSTEMNAME": "juwelsbooster", "SLURM_CLUSTER_NAME": "juwelsbooster"},
    ),
}  # fmt: skip


def rank_environ(name: str, rank: int, size: int, local_size: int) -> dict[str, str]:
    """Return what the site's launcher sets for a rank; ranks fill the nodes in order."""
    site, node, local = SITES[name], rank // local_size, rank % local_size
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size, "PMI_UNIVERSE_SIZE": size}
    pals = {
        "PALS_RANKID": rank, "PALS_LOCAL_RANKID": local, "PALS_NODEID": node,
        "PMI_LOCAL_RANK": local, "PMI_LOCAL_SIZE": local_size,
        "PALS_APID": "6b8e2b0e", "PALS_SPOOL_DIR": "/var/run/palsd/6b8e2b0e",
    }  # fmt: skip
    nodes = size // local_size
    slurm = {
        "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0, "SLURM_STEPID": 0, "SLURM_PROCID": rank,
        "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_NTASKS": size, "SLURM_NPROCS": size,
        "SLURM_STEP_NUM_TASKS": size, "SLURM_NNODES": nodes, "SLURM_STEP_NUM_NODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS_PER_NODE": local_size,
        "SLURM_TASKS_PER_NODE": f"{local_size}(x{nodes})",
        "SLURM_STEP_TASKS_PER_NODE": f"{local_size}(x{nodes})",
        "SLURM_JOB_NODELIST": site.node_list, "SLURM_NODELIST": site.node_list,
        "SLURM_STEP_NODELIST": site.node_list, "SLURM_JOB_NAME": "train.sbatch",
        "SLURMD_NODENAME": site.hosts[node].partition(".")[0], "SLURM_CPUS_ON_NODE": 128,
    }  # fmt: skip
    tables = {
        "pals": {**numbers, **pals, "PALS_LOCAL_SIZE": local_size, "PALS_DEPTH": 8},
        "cray": {**slurm, **numbers, **pals},
        "parastation": {**slurm, "PMI_RANK": rank, "PMI_SIZE": size, "PSP_SMP_NODE_ID": node},
    }
    table = tables["pals" if site.launcher == "pals" else site.pmi]
    return {key: str(value) for key, value in table.items()} | dict(site.environ)


def addresses(name: str, node: int) -> dict[str, str]:
    """Return the address of each interface of a node."""
    names = ("lo", SITES[name].slow, *SITES[name].fast)
    networks = ("127.0.0", "10.100.0", *(f"10.25{n}.0" for n in range(len(names))))
    return {
        interface: f"{network}.{1 if interface == 'lo' else 10 + node}"
        for interface, network in zip(names, networks, strict=False)
    }


def plant_devices(root: Path, name: str) -> None:
    """Make the network devices of a node below `root`, and the tables of its kernel."""
    site = SITES[name]
    for number, interface in enumerate(site.fast):
        ethernet(root, interface, 200_000, f"pci0000:10/0000:10:0{number}.0")
        if interface.startswith("hsn"):
            write(root / f"sys/class/cxi/cxi{number}/device", {"vendor": "0x17db"})
    ethernet(root, site.slow, 1000)
    write(root / "proc/net", {"route": "Iface\tDestination\tGateway\n"})
    mounts = ("/dev/nvme0n1 / xfs rw 0 0", "tmpfs /dev/shm tmpfs rw 0 0",
              "home:/home /home nfs4 rw 0 0", "mds:/work /work lustre rw 0 0")  # fmt: skip
    write(root / "proc", {"mounts": "\n".join(mounts)})


#: Variables of the launchers of this machine by which a rank could be known.
_REAL = ("OMPI_COMM_WORLD_", "MPI_LOCAL", "PMI_LOCAL")


def main() -> None:
    """Become the program of a rank at a site."""
    from hpctrain.core.launchers import launched

    name, *program = sys.argv[1:]
    job = launched(os.environ)
    for variable in [v for v in os.environ if v.startswith(_REAL)]:
        del os.environ[variable]
    os.environ.update(rank_environ(name, job.rank, job.size, job.size))
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys()
    assert launched(os.environ).name == SITES[name].launcher
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
