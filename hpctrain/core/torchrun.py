"""Torchrun's variables for the ranks of MPI, and the choice between these ranks and others.

Scripts made for torchrun read RANK, LOCAL_RANK, WORLD_SIZE and more from their environment. All
functions here are functions of an environment. Run as a module, it sets the variables of one rank
and becomes the program of that rank: `python -m hpctrain.core.torchrun HOST PORT PROGRAM ARGS`.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from hpctrain.core import launchers
from hpctrain.core.launchers import TITLES, Launched

TORCHRUN = "TORCHELASTIC_RUN_ID"  #: the variable that torchrun alone sets
#: what PyTorch's own rendezvous `env://` reads
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOPBACK = "127.0.0.1"


def variables(job: Launched, node: int, address: str, port: int) -> dict[str, str]:
    """Return torchrun's variables of a rank of `job` on `node`; rank 0 is at `address`.

    GROUP_RANK is the number of the node, which others call NODE_RANK.
    """
    numbers = {
        "RANK": job.rank,
        "LOCAL_RANK": job.local_rank,
        "WORLD_SIZE": job.size,
        "LOCAL_WORLD_SIZE": job.local_size,
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in numbers.items() if value is not None}


def launched_variables(environ: Mapping[str, str], host: str, port: int) -> dict[str, str]:
    """Return torchrun's variables from the launcher's in `environ`; none for no launcher.

    Launchers give no number of the node: ranks are taken to fill the nodes in order. `host`: of
    rank 0; it is not needed where all ranks are on one node.
    """
    job = launchers.launched(environ)
    if job.name == "none":
        return {}
    if job.local_size in (None, job.size):
        return variables(job, 0, LOOPBACK if job.local_size else host, port)
    return variables(job, job.rank // job.local_size, host, port)


def set_variables(values: Mapping[str, str]) -> None:
    """Set the variables `values` in this process, and remove an outer torchrun's."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ.update(values)


def reserve_port() -> socket.socket:
    """Return a socket that reserves a port, which PyTorch's store may take once it is closed.

    It does not listen, so that a socket which allows the reuse of its address may.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


@dataclass(frozen=True)
class Choice:
    """The source of a process group's ranks: MPI, PyTorch, or neither, with the reason."""

    source: Literal["mpi", "pytorch", "refused"]
    text: str = ""  #: why it is refused, or the warning about `stale`
    stale: tuple[str, ...] = ()  #: variables set before the launcher, which the job replaces
    rank: str = ""  #: the rank that the script wants; "" for the rank in MPI


def choose_ranks(
    environ: Mapping[str, str],
    is_own_backend: bool,
    arguments: Mapping[str, str] | None = None,
    inherited: Mapping[str, str] | None = None,
) -> Choice:
    """Return the source of the ranks of `init_process_group` with `env://`: MPI or PyTorch.

    `arguments`: "RANK" and "WORLD_SIZE" if the script gives them as arguments. `inherited`: the
    environment with which the launcher started this rank; what it has is equal on all ranks, so
    these are no ranks of this job.
    """
    job = launchers.launched(environ)
    values = {name: environ.get(name, "") for name in (*REQUIRED, "LOCAL_RANK")}
    values |= arguments or {}
    chosen_names = {name for name in values if values[name] != (inherited or {}).get(name, "")}
    missing = [name for name in REQUIRED if not values[name]]
    if environ.get(TORCHRUN) and missing and job.name == "none":
        return Choice("refused", f"torchrun has set {', '.join(missing)}, and the script unset it")
    if environ.get(TORCHRUN) and not missing:
        return _under_torchrun(job, values, is_own_backend)
    if job.name == "none":
        return _without_launcher(values, is_own_backend)
    return _under_launcher(job, values, chosen_names, is_own_backend)


def _under_torchrun(job: Launched, values: Mapping[str, str], is_own_backend: bool) -> Choice:
    if not is_own_backend:
        return Choice("pytorch")
    if values["WORLD_SIZE"] == "1" and job.size == 1:
        return Choice("mpi")
    return Choice(
        "refused",
        f"the backend hpctrain has the ranks of MPI, {job.size}, but torchrun gave "
        f"{_describe_numbers(values)}: start the script with `mpirun -n {values['WORLD_SIZE']} "
        f"python -m hpctrain.torch SCRIPT`, or srun, instead of torchrun, or unset {TORCHRUN}",
    )


def _without_launcher(values: Mapping[str, str], is_own_backend: bool) -> Choice:
    """Without a launcher other backends have PyTorch's own rendezvous, and its errors."""
    if not is_own_backend:
        return Choice("pytorch")
    if values["RANK"] in ("", "0") and values["WORLD_SIZE"] in ("", "1"):
        return Choice("mpi")
    size = values["WORLD_SIZE"] if values["WORLD_SIZE"] not in ("", "1") else "N"
    return Choice(
        "refused",
        f"{_describe_numbers(values)}, but no launcher of MPI has started this script: start it "
        f"with `mpirun -n {size} python -m hpctrain.torch SCRIPT`, or unset RANK and WORLD_SIZE "
        "for one rank",
    )


def _under_launcher(
    job: Launched, values: Mapping[str, str], chosen_names: set[str], is_own_backend: bool
) -> Choice:
    """The decision is equal on all ranks: no comparison with this rank's number decides it."""
    is_complete = all(values[name] for name in REQUIRED)
    has_other_size = values["WORLD_SIZE"] not in ("", str(job.size))
    has_chosen_ranks = "RANK" in chosen_names and (
        "WORLD_SIZE" in chosen_names or not has_other_size
    )
    if not is_own_backend and is_complete and (has_chosen_ranks or job.size == 1):
        return Choice("pytorch")
    if has_other_size and "WORLD_SIZE" in chosen_names:
        return Choice(
            "refused",
            f"{_describe_numbers(values)}, but {TITLES[job.name]} has started rank {job.rank} of "
            f"{job.size}: unset RANK and WORLD_SIZE, or leave the arguments rank and world_size out"
            + ("" if is_own_backend else ", or set MASTER_ADDR and MASTER_PORT as well"),
        )
    return _ranks_of_mpi(job, values, chosen_names)


def _ranks_of_mpi(job: Launched, values: Mapping[str, str], chosen_names: set[str]) -> Choice:
    mpi_numbers = {"RANK": job.rank, "WORLD_SIZE": job.size, "LOCAL_RANK": job.local_rank}
    stale = tuple(
        name
        for name, number in mpi_numbers.items()
        if name not in chosen_names and number is not None and values[name] not in ("", str(number))
    )
    warning = (
        f"{', '.join(f'{name}={values[name]}' for name in stale)}: set before {TITLES[job.name]} "
        f"started rank {job.rank} of {job.size}, and replaced: unset {' '.join(stale)}"
    )
    rank = values["RANK"] if "RANK" in chosen_names else ""
    return Choice("mpi", warning if stale else "", stale, rank)


def _describe_numbers(values: Mapping[str, str]) -> str:
    """Return the given rank and size in words."""
    return f"rank {values['RANK'] or '(unset)'} of {values['WORLD_SIZE'] or '(unset)'}"


def main() -> NoReturn:
    """Set the variables of this rank, and become its program."""
    host, port, *program = sys.argv[1:]
    set_variables(launched_variables(os.environ, host, int(port)))
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"hpctrain: {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
