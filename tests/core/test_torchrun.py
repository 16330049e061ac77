"""torchrun: the variables of a rank, and whose ranks a process group has in any environment."""

from __future__ import annotations

from itertools import product

import pytest

from hpctrain.core.launchers import Launched
from hpctrain.core.torchrun import REQUIRED, choose_ranks, launched_variables, variables

OWN = {
    "RANK": "{rank}",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "{rank}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
STALE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "5",
    "MASTER_ADDR": "old",
    "MASTER_PORT": "1",
}
LAUNCHERS = {
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "hydra": {
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "{rank}",
        "MPI_LOCALNRANKS": "2",
    },
    "srun": {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{rank}",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    },
    "alone": {},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
}
STATES = ("set", "unset", "stale")
MPI_LAUNCHERS = ("openmpi", "hydra", "srun")


def numbered(environ: dict[str, str], rank: int) -> dict[str, str]:
    return {name: value.format(rank=rank) for name, value in environ.items()}


def expected(launcher, backend, origin, states):
    """Return whose ranks these are, by the rules of docs/pytorch.md."""
    complete = all(states[name] != "unset" for name in REQUIRED)
    if launcher == "torchrun":
        return "pytorch" if complete and backend == "gloo" else "refused"
    if launcher == "alone":
        single = states["RANK"] != "stale" and states["WORLD_SIZE"] == "unset"
        return "pytorch" if backend == "gloo" else "mpi" if single else "refused"
    if origin == "before the launcher":
        return "mpi"
    if backend == "gloo" and complete:
        return "pytorch"
    return "refused" if states["WORLD_SIZE"] == "stale" else "mpi"


@pytest.mark.parametrize("origin", ["before the launcher", "by the script"])
@pytest.mark.parametrize("backend", ["hpctrain", "gloo"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_environment_has_the_ranks_of_one_job_or_one_line(launcher, backend, origin):
    for combination in product(STATES, repeat=len(OWN)):
        states = dict(zip(OWN, combination, strict=True))
        ranks = (0,) if launcher == "alone" else (0, 1)
        choices = [choose(launcher, backend, origin, states, rank) for rank in ranks]
        where = (launcher, backend, origin, states)
        assert {choice.source for choice in choices} == {expected(*where)}, where
        for rank, choice in enumerate(choices):
            check(choice, rank, *where)


def values_of(states, rank):
    tables = {"set": numbered(OWN, rank), "stale": STALE}
    return {name: tables[state][name] for name, state in states.items() if state != "unset"}


def choose(launcher, backend, origin, states, rank):
    start = numbered(LAUNCHERS[launcher], rank)
    values = values_of(states, rank)
    inherited = start | values if origin == "before the launcher" else start
    return choose_ranks(start | values, backend == "hpctrain", {}, inherited)


def check(choice, rank, launcher, backend, origin, states):
    assert "\n" not in choice.text
    if choice.source == "pytorch" and launcher != "alone":
        assert all(states[name] != "unset" for name in REQUIRED)  # else PyTorch has its own error
    if choice.source == "refused":
        assert "unset" in choice.text
    stale = {name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if states[name] == "stale"}
    is_replaced = choice.source == "mpi" and launcher in MPI_LAUNCHERS
    is_replaced = is_replaced and origin == "before the launcher"
    assert set(choice.stale) == (stale if is_replaced else set())
    assert all(f"{name}={STALE[name]}" in choice.text for name in choice.stale)
    assert bool(choice.text) == (choice.source == "refused" or bool(choice.stale))
    by_script = choice.source == "mpi" and launcher in MPI_LAUNCHERS and origin == "by the script"
    assert choice.rank == (values_of(states, rank).get("RANK", "") if by_script else "")


OMPI = numbered(LAUNCHERS["openmpi"], 1)
#: environment, arguments, inherited environment -> whose ranks with "hpctrain", with "gloo"
CASES = {
    "nothing": (OMPI, {}, {}, "mpi", "mpi"),
    "empty": (OMPI | {"RANK": "", "WORLD_SIZE": ""}, {}, {}, "mpi", "mpi"),
    "arguments": (OMPI, {"RANK": "1", "WORLD_SIZE": "2"}, {}, "mpi", "mpi"),
    "half of the arguments": (OMPI, {"WORLD_SIZE": "2"}, {}, "mpi", "mpi"),
    "arguments of others": (OMPI, {"RANK": "0", "WORLD_SIZE": "3"}, {}, "refused", "refused"),
    "arguments and the rest": (
        OMPI | {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "3"},
        {},
        "refused",
        "pytorch",
    ),
    "no number": (OMPI | {"WORLD_SIZE": "two"}, {}, {}, "refused", "refused"),
    "no number, stale": (OMPI | {"RANK": "x"}, {}, {"RANK": "x"}, "mpi", "mpi"),
    # A job script may start each rank by a launcher of its own.
    "launchers of one rank": (
        OMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"} | STALE,
        {},
        STALE,
        "mpi",
        "pytorch",
    ),
    "torchrun under srun": (
        numbered(LAUNCHERS["srun"], 0) | {"TORCHELASTIC_RUN_ID": "7"} | STALE,
        {},
        {},
        "refused",
        "pytorch",
    ),
    "torchrun of one": (
        {"TORCHELASTIC_RUN_ID": "7"} | numbered(OWN, 0) | {"WORLD_SIZE": "1"},
        {},
        {},
        "mpi",
        "pytorch",
    ),
    "torchrun around mpirun": (OMPI | {"TORCHELASTIC_RUN_ID": "7"}, {}, {}, "mpi", "mpi"),
    "alone, of one": ({"RANK": "0", "WORLD_SIZE": "1"}, {}, {}, "mpi", "pytorch"),
}


@pytest.mark.parametrize("case", CASES)
def test_choice(case):
    environ, arguments, inherited, own, other = CASES[case]
    assert choose_ranks(environ, True, arguments, inherited).source == own
    assert choose_ranks(environ, False, arguments, inherited).source == other


def test_variables_are_those_of_torchrun():
    assert variables(Launched("srun", 5, 8, 1, 4), 1, "node0", 29500) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
    }


@pytest.mark.parametrize(
    ("changes", "node", "address"),
    [
        ({}, "0", "127.0.0.1"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}, "2", "first"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "0", "first"),
    ],
)
def test_variables_from_those_of_a_launcher(changes, node, address):
    values = launched_variables(OMPI | changes, "first", 9)
    assert (values["GROUP_RANK"], values["MASTER_ADDR"]) == (node, address)


def test_a_process_on_its_own_has_no_variables():
    assert launched_variables({}, "first", 9) == {}
