"""`hpctrain netlab`: several hosts on one machine, with real MPI over TCP on shaped links between.

    mpiexec          a network namespace of the lab's own; bridge 10.99.0.254/24
       |--- v1 ====== eth0 10.99.0.1, host h1: ranks 0 .. R-1
       |--- v2 ====== eth0 10.99.0.2, host h2: ranks R .. 2R-1      ==== is a veth pair; both ends
       ...                                                          send at `bits` per second (tbf)

A host is a process that holds namespaces for network, hostname, shared memory and mounts; ssh is
replaced by a script that enters them (namespaces.py). Everything lives in one PID namespace whose
first process ends when this one does, in whatever way: then the kernel kills every process of the
lab, and with the last one namespaces, links and mounts are gone. Nothing has a name outside, so
nothing can stay behind, and labs do not see each other. Where users may make namespaces, no root is
needed.

Hosts have cores of their own where these are as many as ranks, as machines have; else they share
all.
Between hosts there is TCP alone, and within one MPI's own shared memory: Open MPI's is selected by
`btl = tcp,self,sm`; MPICH's own (of its device ch4) needs no option, while UCX's would cross hosts.
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

from hpctrain.cluster.launch import Mpi, eager_defaults, find_mpi, stop_signals
from hpctrain.cluster.netlab.namespaces import INTERFACE, NETWORK, SHM, SSH, address, probe_script
from hpctrain.core import launchers
from hpctrain.core.errors import UsageError
from hpctrain.core.interpreter import module_command

MOST_HOSTS = 64
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname", "taskset")
LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun", "prun", "srun")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_INTERRUPTED, _GRACE_S = 130, 10.0


@dataclass(frozen=True)
class Lab:
    """Hosts with as many ranks each; `bits` is the rate of each host's link each way, in bit/s."""

    hosts: int
    ranks_per_host: int
    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise UsageError(f"--hosts {self.hosts}: a netlab has 1 to {MOST_HOSTS} hosts")
        if self.ranks_per_host < 1:
            raise UsageError(f"--ranks-per-host {self.ranks_per_host}: a host has at least 1 rank")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


def bits_of(speed: str) -> int:
    """Return the bit/s of words such as "1gbit", "2.5Gbit", "100mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", speed.lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 10**6 <= bits <= 10**11:
        raise UsageError(f"--link {speed}: expected 1mbit to 100gbit, such as 1gbit or 2.5gbit")
    return bits


def refusal() -> str | None:
    """Return the reason why no netlab can be made on this machine, else None; takes a moment."""
    missing_tools = [tool for tool in TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing_tools:
        return f"netlab needs Linux with {', '.join(missing_tools or TOOLS)} (iproute2, util-linux)"
    process = subprocess.run(
        [*namespaces(), "sh", "-ec", probe_script()], capture_output=True, text=True
    )
    if process.returncode == 0:
        return None
    lines = process.stderr.strip().splitlines() or ["no reason was given"]
    return (
        f"netlab needs network namespaces, veth and tc's tbf, which are refused here: {lines[0]}; "
        "run it as root, or where users may make namespaces"
    )


def netlab(lab: Lab, argv: Sequence[str]) -> int:
    """Run `argv` on all ranks of `lab` and return its exit code; 130 if it was interrupted.

    Raises UsageError inside a rank of a job, where `argv` would start ranks itself, and where
    namespaces or MPI are missing.
    """
    _refuse(lab, argv)
    mpi = find_mpi()
    inner = [*module_command("hpctrain.cluster.netlab.namespaces"), json.dumps(asdict(lab))]
    line = [*namespaces(), *inner, *command(mpi, lab, argv)]
    return _run(line, environment(mpi, lab.ranks, os.environ))


def namespaces() -> list[str]:
    """Return the beginning of a command line that runs in namespaces of the lab's own."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    apart = ["--net", "--mount", "--pid", "--mount-proc"]
    return ["unshare", *user, *apart, "--fork", "--kill-child"]


def command(mpi: Mpi, lab: Lab, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` on all ranks, once inside the lab."""
    if mpi.mpiexec is None or mpi.vendor not in ("Open MPI", "MPICH"):
        raise UsageError(
            f"netlab starts ranks with the mpiexec of Open MPI or MPICH; mpi4py loads {mpi.vendor} "
            f"({mpi.libmpi}), mpiexec: {mpi.mpiexec}"
        )
    per_host, addresses = lab.ranks_per_host, [address(host) for host in range(1, lab.hosts + 1)]
    if mpi.vendor == "MPICH":
        options = f"-launcher ssh -launcher-exec {SSH} -iface {INTERFACE} -ppn {per_host}"
        hosts = ["-hosts", ",".join(f"{ip}:{per_host}" for ip in addresses)]
    else:
        options = (
            f"--prtemca plm ssh --prtemca plm_ssh_agent {SSH} --prtemca prte_if_include {NETWORK} "
            f"--prtemca plm_ssh_no_tree_spawn 1 --map-by ppr:{per_host}:node:oversubscribe "
            # Its session folder identifies processes by PID, and ours begin again from 1.
            f"--prtemca prte_tmpdir_base {SHM} --bind-to none --stdin none"
        )
        hosts = ["--host", ",".join(f"{ip}:{per_host}" for ip in addresses)]
    return [mpi.mpiexec, *options.split(), *hosts, "-n", str(lab.ranks), *argv]


def environment(mpi: Mpi, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of all `ranks`: those of `environ` override netlab's defaults.

    Programs are looked for beside this Python first: `hpctrain` and `python` are then these.
    """
    path = {"PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}"}
    inherited = {
        k: v
        for k, v in launchers.without_rank_variables(environ).items()
        if not k.startswith("SLURM")
    }
    return _defaults(mpi, ranks) | inherited | path


def _defaults(mpi: Mpi, ranks: int) -> dict[str, str]:
    """Return the variables that keep MPI to TCP between hosts, and fast there."""
    if mpi.vendor == "MPICH":
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}
    permissions = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    # Of Open MPI's own collectives, `han` collapses on such hosts: an honest rival does without.
    chosen = {"pml": "ob1", "btl": "tcp,self,sm", "btl_tcp_if_include": NETWORK, "coll": "^han"}
    if ranks > (os.cpu_count() or 1):
        # It takes each host's cores for its own: a message would wait until a spinning rank is
        # stopped, 4 ms for 4 bytes.
        chosen["mpi_yield_when_idle"] = "1"
    return (
        permissions
        | {f"OMPI_MCA_{name}": value for name, value in chosen.items()}
        | eager_defaults()
    )


def _refuse(lab: Lab, argv: Sequence[str]) -> None:
    program = next((word for word in argv if word != "env" and "=" not in word), "")
    name = Path(program).name
    if name.partition(".")[0] in LAUNCHERS:  # also mpiexec.hydra
        raise UsageError(
            f"netlab -- {name} ...: netlab starts the {lab.ranks} ranks itself, and each would "
            f"start a job of its own; leave {name} out: hpctrain netlab --hosts {lab.hosts} "
            f"--ranks-per-host {lab.ranks_per_host} -- PROGRAM ..."
        )
    outer = launchers.launched(os.environ)
    if outer.size > 1:
        raise UsageError(f"this is rank {outer.rank} of {outer.size}: netlab starts ranks itself")
    if (reason := refusal()) is not None:
        raise UsageError(reason)


def _run(line: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the lab in a session of its own; it ends by itself, or when its stdin does.

    The pipe is closed also by the kernel, if this process is killed.
    """
    with stop_signals() as receive:
        process = subprocess.Popen(line, env=environ, stdin=subprocess.PIPE, start_new_session=True)
        try:
            stopped: list[int] = []
            while process.poll() is None and not stopped:
                stopped = receive()
        finally:
            _end(process)
    if stopped:
        # `timeout` and schedulers stop us without a word of theirs.
        name = signal.Signals(stopped[0]).name
        print(f"hpctrain: netlab: stopped by {name}", file=sys.stderr, flush=True)
        return _INTERRUPTED
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the lab end; `unshare` returns when no process of its PID namespace is left."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # --kill-child takes the rest along
        process.wait()
