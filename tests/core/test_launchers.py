"""launchers: ranks and sizes from the environment variables that each launcher sets."""

from __future__ import annotations

import pytest

from hpctrain.core.launchers import (
    SINGLE_RANK,
    Launched,
    allocated_tasks,
    launched,
    mismatch,
    nodes,
    only_pmix,
    pmix_of_daemons,
    unstartable,
    without_rank_variables,
)

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
# What Slurm's plugin mpi/cray_shasta sets, at first and later.
CRAY = {"PALS_APID": "u", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "1"}
CRAY_PMI = {"PMI_RANK": "3", "PMI_SIZE": "5", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
DAEMON = SRUN | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
BATCH = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}

TABLE = {
    "alone": ({}, SINGLE_RANK),
    "openmpi": (OPENMPI, Launched("openmpi", 3, 4, 1, 2)),
    "openmpi in slurm": (DAEMON | OPENMPI, Launched("openmpi", 3, 4, 1, 2)),
    "mvapich2": (
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "0",
            "MV2_COMM_WORLD_LOCAL_SIZE": "1",
        },
        Launched("mvapich2", 1, 2, 0, 1),
    ),
    "hydra": (HYDRA, Launched("hydra", 5, 6, 2, 3)),
    "hydra in slurm": (DAEMON | HYDRA, Launched("hydra", 5, 6, 2, 3)),
    "pals": (
        {"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1"},
        Launched("pals", 1, 8, 1, None),
    ),
    "pals, later": (
        {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"},
        Launched("pals", 5, 8, 1, 4),
    ),
    "flux": (
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "PMI_RANK": "1"},
        Launched("flux", 1, 2, 1, None),
    ),
    "jsm": (
        {
            "JSM_NAMESPACE_RANK": "6",
            "JSM_NAMESPACE_SIZE": "12",
            "JSM_NAMESPACE_LOCAL_RANK": "0",
            "JSM_NAMESPACE_LOCAL_SIZE": "6",
        },
        Launched("jsm", 6, 12, 0, 6),
    ),
    "srun": (SRUN, Launched("srun", 3, 5, 1, 2)),
    "srun pmi2": (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}, Launched("srun", 3, 5, 1, 2)),
    "srun pmix": (SRUN | {"PMIX_RANK": "3"}, Launched("srun", 3, 5, 1, 2)),
    "srun cray_shasta": (SRUN | CRAY, Launched("srun", 3, 5, 1, 2)),
    "srun cray_shasta, later": (SRUN | CRAY | CRAY_PMI, Launched("srun", 3, 5, 1, 2)),
    "pals in slurm": (DAEMON | CRAY | CRAY_PMI, Launched("pals", 3, 5, 1, 2)),
    "srun, last node": (
        SRUN | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"},
        Launched("srun", 4, 5, 0, 1),
    ),
    "srun, old name": (
        BATCH | {"SLURM_STEPID": "0", "SLURM_STEP_TASKS_PER_NODE": ""},
        Launched("srun", 3, 5, 1, None),
    ),
    "srun of fewer tasks": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "4"},
        Launched("srun", 3, 4, 1, 2),
    ),
    "batch script": (BATCH, SINGLE_RANK),
    "interactive step": (SRUN | {"SLURM_STEP_ID": "4294967290"}, SINGLE_RANK),
    "srun, no number": (SRUN | {"SLURM_PROCID": "three"}, SINGLE_RANK),
    "gforker in slurm": (
        DAEMON | {"PMI_RANK": "1", "PMI_SIZE": "2"},
        Launched("pmi", 1, 2, None, None),
    ),
    "cray pmi": (
        {"PMI_RANK": "4", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "4"},
        Launched("pmi", 4, 8, 0, 4),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_launched(case):
    environ, expected = TABLE[case]
    assert launched(environ) == expected


@pytest.mark.parametrize("reported, number", [("4", 4), ("2(x3),1", 7), ("", None)])
def test_slots(reported, number):
    assert allocated_tasks({"SLURM_TASKS_PER_NODE": reported}) == number


@pytest.mark.parametrize(
    "hosts, slurm, names",
    [
        ("abab", ["", "", "", ""], "abab"),
        ("aabb", ["n1", "n1", "n2", "n2"], ["n1", "n1", "n2", "n2"]),
        ("aaaa", ["n1", "n1", "n2", "n2"], ["n1", "n1", "n2", "n2"]),  # one machine, in a test
        ("aabb", ["n1", "n1", "n1", "n1"], "aabb"),  # handed on from the first node
        ("abcc", ["n1", "n1", "n3", ""], ["a", "b", "n3", "c"]),
    ],
)
def test_nodes(hosts, slurm, names):
    assert nodes(hosts, slurm) == tuple(names)


def test_scrubbed_environment_is_no_rank_and_keeps_settings():
    settings = {
        "PATH": "/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_MCA_osc": "^ucx",
        "PMIX_MCA_psec": "native",
        "PRTE_MCA_plm": "ssh",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
        "HYDRA_IFACE": "ib0",
        "PALS_CPU_BIND": "core",
    }
    rank = (
        OPENMPI
        | HYDRA
        | CRAY
        | CRAY_PMI
        | {"PMI_FD": "9", "PRTE_LAUNCHED": "1", "HYDI_CONTROL_FD": "7"}
    )
    assert without_rank_variables(settings | rank) == settings


@pytest.mark.parametrize(
    "environ, mpi_size, vendor, remedy",
    [
        (OPENMPI, 1, "MPICH", "hpctrain launch -n 4"),
        (HYDRA, 1, "Open MPI", "hpctrain launch -n 6"),
        (SRUN, 1, "Open MPI", "srun --mpi=pmix -n 5"),
        (SRUN, 1, "MPICH", "srun --mpi=pmi2 -n 5"),
        (SRUN, 1, "Cray MPICH", "srun --mpi=cray_shasta -n 5"),
        (HYDRA, 2, "Open MPI", "these are jobs of 2 ranks. Start them with `hpctrain launch -n 6"),
        (OPENMPI, 4, "Open MPI", None),
        (SRUN, 7, "Open MPI", None),  # of a heterogeneous job
        ({}, 1, "MPICH", None),
    ],
)
def test_mismatch(environ, mpi_size, vendor, remedy):
    message = mismatch(launched(environ), mpi_size, vendor, "/opt/lib/libmpi.so.12")
    if remedy is None:
        assert message is None
    else:
        assert message is not None
        assert all(part in message for part in (remedy, vendor, "/opt/lib/libmpi.so.12"))


@pytest.mark.parametrize(
    "environ, vendor, wrong",
    [
        (OPENMPI, "MPICH", True),
        (OPENMPI, "Intel MPI", True),
        (OPENMPI, "Open MPI", False),
        (OPENMPI, "Spectrum MPI", False),  # has the launcher of Open MPI, by its name
        (HYDRA, "Open MPI", False),  # starts, as jobs of one rank: `mismatch` tells
        (HYDRA, "MPICH", False),
        ({}, "MPICH", False),
    ],
)
def test_unstartable(environ, vendor, wrong):
    message = unstartable(launched(environ), vendor, "/opt/lib/libmpi.so.12")
    assert (message is not None) == wrong
    if message:
        parts = ("4 ranks were started by Open MPI's mpirun", vendor, "4 jobs of one rank")
        assert all(part in message for part in parts)


@pytest.mark.parametrize(
    "environ, vendor, wrong",
    [
        (SRUN | {"PMIX_RANK": "3"}, "MPICH", True),
        (SRUN | {"PMIX_RANK": "3"}, "Open MPI", False),
        (SRUN | {"PMIX_RANK": "3"}, "Cray MPICH", False),  # it has its own ways
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5", "PMIX_RANK": "3"}, "MPICH", False),
        (SRUN, "MPICH", False),
    ],
)
def test_mpich_without_pmix(environ, vendor, wrong):
    """MPI_Init would abort: "unsupported PMI version PMIx"."""
    job, path = launched(environ), "/opt/lib/libmpi.so.12"
    message = unstartable(job, vendor, path, no_pmix=only_pmix(environ))
    assert (message is not None) == wrong
    if message:
        assert "without PMIx" in message and "srun --mpi=pmi2 -n 5" in message
    assert unstartable(job, vendor, path) is None  # it knows PMIx


@pytest.mark.parametrize(
    "environ, vendor, wrong",
    [
        (DAEMON | HYDRA | {"PMIX_RANK": "0"}, "Open MPI", True),
        (DAEMON | HYDRA | {"PMIX_RANK": "0"}, "MPICH", False),  # it asks Hydra
        (DAEMON | HYDRA, "Open MPI", False),  # jobs of one rank: `mismatch` tells
        (HYDRA | {"PMIX_RANK": "0"}, "Open MPI", False),
        (DAEMON | OPENMPI, "Open MPI", False),
        (SRUN | {"PMIX_RANK": "3"}, "Open MPI", False),
    ],
)
def test_daemons_taken_for_ranks(environ, vendor, wrong):
    """Ranks of a node would all be rank 0 of PMIx, and MPI_Init of some would never end."""
    job = launched(environ)
    message = unstartable(job, vendor, "/opt/lib/libmpi.so.40", daemons=pmix_of_daemons(environ))
    assert (message is not None) == wrong
    if message:
        assert "its daemons would be taken" in message and "hpctrain launch -n 6" in message
