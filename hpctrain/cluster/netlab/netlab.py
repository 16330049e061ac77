"""`hpctrain netlab`: emulated hosts on one machine, with real MPI over TCP on shaped links.

    mpiexec          a network namespace of the lab's own; bridge 10.99.0.254/24
       |--- v1 ====== eth0 10.99.0.1, host h1: ranks 0 .. R-1
       |--- v2 ====== eth0 10.99.0.2, host h2: ranks R .. 2R-1      ==== is a veth pair; both ends
       ...                                                          send at `bits_per_s` (tbf)

A host is a process that holds namespaces for network, hostname, shared memory and mounts. A script
that enters them (namespaces.py) replaces ssh. All processes live in one PID namespace whose first
process ends when this process ends, however that happens. Then the kernel kills every process of
the lab and removes its namespaces, links and mounts. They have no name outside the lab, so
nothing stays behind, and labs do not see each other. The lab needs no root if users may create
namespaces.

Each host has cores of its own if the machine has enough for all ranks; otherwise hosts share all
cores. Hosts communicate over TCP alone, and ranks on a host through the MPI library's own shared
memory. `btl = tcp,self,sm` selects it in Open MPI. MPICH's own (of its device ch4) needs no option,
whereas UCX's shared memory would cross hosts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

from hpctrain.cluster import rank_states
from hpctrain.cluster.launch import (
    ALLOW_ROOT,
    EAGER_LIMIT,
    MpiInstallation,
    elastic_options,
    find_mpi,
)
from hpctrain.cluster.loss_policy import LossPolicy, check_policy
from hpctrain.cluster.netlab.namespaces import (
    INTERFACE,
    NETWORK,
    SHM_PATH,
    SSH_PATH,
    build_probe_script,
    host_address,
)
from hpctrain.cluster.rank_states import RankStates
from hpctrain.cluster.supervision import catch_stop_signals
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command
from hpctrain.core.printing import say

MAX_HOSTS = 64
REQUIRED_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname", "taskset")
LAUNCHER_NAMES = ("mpiexec", "mpirun", "orterun", "prterun", "prun", "srun")
_BITS_PER_UNIT = {"k": 10**3, "m": 10**6, "g": 10**9}
_EXIT_INTERRUPTED, _END_TIMEOUT_S = 130, 10.0
_OUTPUT_S = 5.0  #: the time given to the last output of a lab that has ended


@dataclass(frozen=True)
class Lab:
    """Equal hosts; `bits_per_s` is the rate of each host's link in each direction."""

    hosts: int
    ranks_per_host: int
    bits_per_s: int

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"--hosts {self.hosts}: a netlab has 1 to {MAX_HOSTS} hosts")
        if self.ranks_per_host < 1:
            raise UsageError(f"--ranks-per-host {self.ranks_per_host}: a host has at least 1 rank")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


def parse_speed(speed: str) -> int:
    """Return the bit/s of a link speed such as "1gbit", "2.5Gbit" or "100mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", speed.lower())
    bits_per_s = round(float(match[1]) * _BITS_PER_UNIT[match[2]]) if match else 0
    if not 10**6 <= bits_per_s <= 10**11:
        raise UsageError(f"--link {speed}: expected 1mbit to 100gbit, such as 1gbit or 2.5gbit")
    return bits_per_s


def unavailable_reason() -> str | None:
    """Return the reason why netlab cannot run on this machine, else None; sets up a small lab."""
    missing_tools = [tool for tool in REQUIRED_TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing_tools:
        tools = ", ".join(missing_tools or REQUIRED_TOOLS)
        return f"netlab needs Linux with {tools} (iproute2, util-linux)"
    process = subprocess.run(
        [*unshare_command(), "sh", "-ec", build_probe_script()], capture_output=True, text=True
    )
    if process.returncode == 0:
        return None
    lines = process.stderr.strip().splitlines() or ["no reason was given"]
    return (
        f"netlab needs network namespaces, veth and tc's tbf, which are refused here: {lines[0]}; "
        "run it as root, or where users may make namespaces"
    )


def netlab(lab: Lab, argv: Sequence[str], policy: LossPolicy | None = None) -> int:
    """Run `argv` on all ranks of `lab` and return its exit code, or 130 if interrupted.

    Raises UsageError inside a rank of a job, if `argv` would start ranks itself, if namespaces or
    MPI are missing, or if `policy`, whose spares are the last ranks of the lab, is impossible.
    """
    policy = policy or LossPolicy()
    check_policy(lab.ranks - policy.spares, policy)
    _check_request(lab, argv)
    mpi = find_mpi()
    options = elastic_options(mpi) if policy.elastic else ()
    states = RankStates(lab.ranks) if policy.elastic else None
    argv = rank_states.command(argv) if states else argv
    lab_command = [*module_command("hpctrain.cluster.netlab.namespaces"), json.dumps(asdict(lab))]
    command = [*unshare_command(), *lab_command, *build_command(mpi, lab, argv, options)]
    environ = rank_environment(mpi, lab.ranks, os.environ) | policy.variables()
    return _run_lab(command, environ, states)


def unshare_command() -> list[str]:
    """Return the beginning of a command line that runs in new namespaces."""
    user_options = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespace_options = ["--net", "--mount", "--pid", "--mount-proc"]
    return ["unshare", *user_options, *namespace_options, "--fork", "--kill-child"]


def build_command(
    mpi: MpiInstallation, lab: Lab, argv: Sequence[str], further_options: Sequence[str] = ()
) -> list[str]:
    """Return the mpiexec command line that runs `argv` on all ranks, for use inside the lab."""
    if mpi.mpiexec is None or mpi.vendor not in ("Open MPI", "MPICH"):
        raise UsageError(
            f"netlab starts ranks with the mpiexec of Open MPI or MPICH; mpi4py loads {mpi.vendor} "
            f"({mpi.libmpi}), mpiexec: {mpi.mpiexec}"
        )
    per_host = lab.ranks_per_host
    addresses = [host_address(host) for host in range(1, lab.hosts + 1)]
    if mpi.vendor == "MPICH":
        options = f"-launcher ssh -launcher-exec {SSH_PATH} -iface {INTERFACE} -ppn {per_host}"
        hosts = ["-hosts", ",".join(f"{ip}:{per_host}" for ip in addresses)]
    else:
        options = (
            f"--prtemca plm ssh --prtemca plm_ssh_agent {SSH_PATH} "
            f"--prtemca prte_if_include {NETWORK} "
            f"--prtemca plm_ssh_no_tree_spawn 1 --map-by ppr:{per_host}:node:oversubscribe "
            # Open MPI names session folders by process id, and each lab counts these from 1.
            f"--prtemca prte_tmpdir_base {SHM_PATH} --bind-to none --stdin none"
        )
        hosts = ["--host", ",".join(f"{ip}:{per_host}" for ip in addresses)]
    words = [*further_options, *options.split(), *hosts, "-n", str(lab.ranks)]
    return [mpi.mpiexec, *words, *argv]


def rank_environment(
    mpi: MpiInstallation, ranks: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the `ranks`: `environ` overrides netlab's defaults.

    The folder of this Python comes first in PATH, so ranks run its `hpctrain` and `python`.
    """
    search_path = {"PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}"}
    inherited_variables = {
        name: value
        for name, value in launchers.without_rank_variables(environ).items()
        if not name.startswith("SLURM")
    }
    return _mpi_defaults(mpi, ranks) | inherited_variables | search_path


def _mpi_defaults(mpi: MpiInstallation, ranks: int) -> dict[str, str]:
    """Return the variables that make MPI use TCP between hosts, at full speed."""
    if mpi.vendor == "MPICH":
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
    # Open MPI's collectives of component `han` are very slow on such hosts. They are switched off,
    # so that `native` is a fair rival in benchmarks.
    mpi_options = {
        "pml": "ob1",
        "btl": "tcp,self,sm",
        "btl_tcp_if_include": NETWORK,
        "coll": "^han",
    }
    if ranks > (os.cpu_count() or 1):
        # Open MPI counts all cores for each host and lets ranks spin: a message of 4 bytes would
        # wait 4 ms, until the kernel preempts a spinning rank.
        mpi_options["mpi_yield_when_idle"] = "1"
    return (
        ALLOW_ROOT
        | {f"OMPI_MCA_{name}": value for name, value in mpi_options.items()}
        | EAGER_LIMIT
    )


def _check_request(lab: Lab, argv: Sequence[str]) -> None:
    program = next((argument for argument in argv if argument != "env" and "=" not in argument), "")
    program_name = Path(program).name
    if program_name.partition(".")[0] in LAUNCHER_NAMES:  # also mpiexec.hydra
        raise UsageError(
            f"netlab -- {program_name} ...: netlab starts the {lab.ranks} ranks itself, and "
            f"each would start a job of its own; leave {program_name} out: hpctrain netlab "
            f"--hosts {lab.hosts} --ranks-per-host {lab.ranks_per_host} -- PROGRAM ..."
        )
    launchers.must_not_be_rank(os.environ, "netlab starts ranks itself")
    if (reason := unavailable_reason()) is not None:
        raise UsageError(reason)


def _run_lab(command: Sequence[str], environ: Mapping[str, str], states: RankStates | None) -> int:
    """Run the lab in a session of its own until it ends or we receive a stop signal.

    `states`: of the ranks of an elastic job, which know its exit code. The lab also ends when its
    stdin is closed, which the kernel does if this process is killed.
    """
    fault, stderr = "", subprocess.PIPE if states else None
    with catch_stop_signals() as read_signals:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
        reader = Thread(target=_forward_stderr, args=[process, states], daemon=True)
        reader.start()
        try:
            received_signals: list[int] = []
            while process.poll() is None and not received_signals and not fault:
                received_signals = read_signals()
                fault = states.find_fault() if states else ""
        finally:
            _end_lab(process)
        reader.join(_OUTPUT_S)
    if received_signals:
        # `timeout` and schedulers send the signal without printing a message.
        signal_name = signal.Signals(received_signals[0]).name
        say(f"hpctrain: netlab: stopped by {signal_name}", err=True)
        return _EXIT_INTERRUPTED
    if states is None:
        return process.returncode
    code, reason = states.exit_code(process.returncode, was_ended=bool(fault))
    for text in filter(None, (fault, reason)):
        say(f"hpctrain: netlab: {text}", err=True)
    return code


def _forward_stderr(process: subprocess.Popen[bytes], states: RankStates | None) -> None:
    """Print the stderr of the lab without the marks of its ranks."""
    if process.stderr is None or states is None:
        return
    while data := os.read(process.stderr.fileno(), 1 << 16):
        sys.stderr.buffer.write(states.feed(data))
        sys.stderr.buffer.flush()
    sys.stderr.buffer.write(states.end())
    sys.stderr.buffer.flush()


def _end_lab(process: subprocess.Popen[bytes]) -> None:
    """End the lab by closing its stdin; `unshare` returns after the last process of the lab."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # --kill-child kills the processes of the lab
        process.wait()
