"""A real Slurm for tests: a controller and four nodes n1 to n4, all on this machine.

    python real_slurm.py FOLDER MPI    starts it, says "up", and ends it when its stdin does; a line
                                       there names a node that was lost, and starts it again

All that it writes lies in FOLDER; ports and munge key are its own; it needs Debian's packages.
Tests install them where they may, unless HPCTRAIN_NO_SLURM is set.
Whoever starts it holds the other end of its stdin, so it ends with them, however they end. It
adopts orphans, and step daemons are such: with it go all jobs.
"""

from __future__ import annotations

import ctypes
import fcntl
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil

from hpctrain.cluster.launch import find_mpi

T = TypeVar("T")
NODES = ("n1", "n2", "n3", "n4")
DAEMONS = ("slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "munged")
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "libpmix2")
INSTALL_S, START_S, STOP_S = 100, 100, 100
#: Step daemons wait a minute for those below them to end, which a lost node never tells, and send
#: their own end several times to one above that is lost: each time until the message's limit.
TREE_S = 200
LOCK = Path("/tmp/hpctrain-slurm.lock")  # of all runs of tests, whose temporary folders differ
SBIN = (
    f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # a user's PATH may lack the daemons' folders
)
PLUGINS = Path("/usr/lib/x86_64-linux-gnu/slurm-wlm")
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib")
SET_CHILD_SUBREAPER = 36
# Of another Slurm; and where many ranks may share a core, which is for launchers without Slurm.
OF_OTHERS = ("SLURM_", "SBATCH_", "SRUN_", "PRTE_MCA_rmaps")
ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE",
    "BOOT_FAIL", "OUT_OF_MEMORY",
)  # fmt: skip

# Jobs are not numbered from 1: MPICH names its shared memory after the job, and finds what a killed
# one of that number has left there.
# No cgroups, no accounting, and no waiting where Slurm usually gathers work. Each node has its own
# temporary folder: PMIx keeps its sockets there.
CONF = """\
ClusterName=hpctrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PluginDir={folder}/lib
MpiDefault={mpi}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=600
MailProg=/bin/true
GresTypes=gpu
TmpFS={folder}/tmp/%n
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=4000 "
    "Gres=gpu:4 State=UNKNOWN"
)
GPUS = "Name=gpu File=/dev/tty[0-3]\n"  # stand-ins: Slurm only wants four files


@cache
def missing() -> str | None:
    """Return why there can be no Slurm here, after trying to install it; None where it is."""
    if os.environ.get("HPCTRAIN_NO_SLURM"):
        return "HPCTRAIN_NO_SLURM is set: Slurm is neither installed nor started"
    if os.geteuid() or shutil.which("apt-get") is None:
        lack = _lacks()
        return f"no {lack} here, and only root with apt-get can install it" if lack else None
    deadline = time.monotonic() + INSTALL_S
    with open(LOCK, "w") as lock:  # tests with both MPIs come here at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _install(deadline) if _lacks() else None


def _lacks() -> str:
    return ", ".join(name for name in COMMANDS if shutil.which(name, path=SBIN) is None)


def _install(deadline: float) -> str | None:
    get = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=30"]
    install = [*get, "install", "-y", "--no-install-recommends", *PACKAGES]
    environ, message = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, ""
    for command in (install, [*get, "update"], install):
        try:
            completed = subprocess.run(
                command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=max(deadline - time.monotonic(), 1),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"Slurm is not here, and was not installed within {INSTALL_S} s"
        if command is install and completed.returncode == 0:
            return None
        message = completed.stderr.strip()[-300:]
    return f"Slurm is not here, and apt-get cannot install it: {message}"


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: what tests say to it."""

    folder: Path
    environ: Mapping[str, str]  #: for its commands, and for what is to run in its jobs
    keeper: subprocess.Popen | None = None  #: what holds its daemons, see `main`
    jobs: list[int] = field(default_factory=list)  #: all that were submitted

    @property
    def srun(self) -> str:
        """The command that starts ranks; without --mpi it does the same, as on a cluster."""
        return f"srun -K1 --mpi={_pmi()}"

    def run(self, *command: object, cwd: Path | None = None, timeout: float = 60) -> str:
        """Return what a command of Slurm prints; raise with its own words where it fails."""
        completed = subprocess.run(
            list(map(str, command)), env=self.environ, cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        if completed.returncode:
            raise RuntimeError(f"{command} ended with {completed.returncode}: {completed.stderr}")
        return completed.stdout

    def sbatch(self, script: Path | str, *options: object, cwd: Path) -> int:
        """Submit a script, or the text of one, from folder `cwd`; return the job's id."""
        if isinstance(script, str):
            text, script = script, cwd / "job.sh"
            script.write_text(text)
        message = self.run("sbatch", "--parsable", *options, script, cwd=cwd)
        self.jobs.append(int(message.split(";")[0]))
        return self.jobs[-1]

    def scontrol(self, *words: object) -> str:
        """Run `scontrol WORDS` and return what it prints."""
        return self.run("scontrol", *words)

    def job(self, job: int | str) -> dict[str, str]:
        """Return what `scontrol show job` tells; of an array, what it tells of its first task."""
        line = self.scontrol("--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def state(self, job: int | str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED ..."""
        return self.job(job)["JobState"]

    def wait(self, job: int, *states: str, limit_s: float = 100) -> str:
        """Wait until the job is in one of `states`, by default until it has ended; return it.

        Raises AssertionError, with what the job said, after `limit_s` or where it ended otherwise.
        """
        expected, deadline = states or ENDED, time.monotonic() + limit_s
        while (state := self.state(job)) not in expected:
            if state in ENDED or time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state}, not {expected}:\n{self.told(job)}")
            time.sleep(0.1)
        return state

    def told(self, job: int | str) -> str:
        """Return what a job wrote, what the controller did of late, and errors of the nodes."""
        out = Path(self.job(job)["StdOut"])
        message = [out.read_text() if out.exists() else f"(no {out})"]
        message += (self.folder / "slurmctld.log").read_text().splitlines()[-20:]
        for log in sorted(self.folder.glob("slurmd-n?.log")):
            lines = log.read_text().splitlines()
            message += [f"{log.stem}: {line}" for line in lines if "error" in line][-5:]
        return "\n".join(message)

    def hurry(self, job: int) -> None:
        """Let a job that was requeued start soon: Slurm makes it wait for two minutes.

        Not now: what its nodes were told of its end holds to the end of the second. And its step
        daemons are to be gone, whose sockets have the names of those to come.
        """
        ids = self._parts(job)
        until(lambda: not self._daemons(ids), TREE_S, lambda: f"{self._daemons(ids)} do not end")
        self.scontrol("update", f"jobid={job}", "StartTime=now+1")

    def _parts(self, job: int) -> list[str]:
        """Return the ids of the parts of a heterogeneous job, the id of any other alone."""
        lines = self.scontrol("--oneliner", "show", "job", job).splitlines()
        parts = [line.split()[0] for line in lines if "HetJobId=" in line]
        return [part.removeprefix("JobId=") for part in parts] or [str(job)]

    def nudge(self, job: int | str) -> None:
        """Let a job start soon that put itself back into the queue: MPI does not always start."""
        told = self.job(job)
        soon = f"{datetime.now() + timedelta(seconds=9):%Y-%m-%dT%H:%M:%S}"  # else: hurried already
        waits = (told["JobState"], told["Reason"]) == ("PENDING", "BeginTime")
        if waits and told["EligibleTime"] > soon:
            self.hurry(int(told["JobId"]))

    def finish(self, job: int | str, limit_s: float = 100) -> str:
        """Wait until the job has ended, however often it comes back; return its last state."""
        deadline = time.monotonic() + limit_s
        while (state := self.state(job)) not in ENDED:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state}:\n{self.told(job)}")
            self.nudge(job)
            time.sleep(0.1)
        return state

    def node_down(self, name: str) -> None:
        """Let the controller take a node for lost: its jobs end, or are requeued."""
        self.scontrol("update", f"nodename={name}", "state=down", "reason=test")

    def node_lost(self, name: str) -> None:
        """Kill all that runs on a node at once, as where its power fails, and its health check."""
        until(lambda: not self._kill_on(name), STOP_S, f"what runs on {name} does not end")
        self.node_down(name)

    def _kill_on(self, node: str) -> bool:
        """Kill what runs on a node, daemons first; return whether anything does, or may."""
        nodes = {process: _node_of(process) for process in self._processes()}
        result = [process for process, name in nodes.items() if name == node]
        for process in sorted(result, key=lambda p: not str(_observed(p.name)).startswith("slurm")):
            _kill(process.pid)
        return not {node, "?"}.isdisjoint(nodes.values())

    def _daemons(self, jobs: Sequence[str]) -> list[str]:
        """Return the step daemons of jobs, which write their names over their command lines."""
        lines = {process: " ".join(_observed(process.cmdline)) for process in self._processes()}
        result = [p for p, line in lines.items() if any(f"[{job}." in line for job in jobs)]
        return [f"{lines[process]} on {_node_of(process)}" for process in result]

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self.keeper.pid).children(recursive=True)

    def node_up(self, name: str) -> None:
        """Put a node back to work."""
        print(name, file=self.keeper.stdin)
        with suppress(RuntimeError):  # an idle node only has to answer
            self.scontrol("update", f"nodename={name}", "state=resume")

    def nodes(self) -> dict[str, str]:
        """Return the state of each node: idle, mixed, allocated, down ..."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def clear(self) -> None:
        """Cancel the jobs that were submitted and put all nodes back to work."""
        for job in self.jobs:
            self.run("scancel", "--quiet", job)
        for name in self._broken():
            self.node_up(name)
        until(
            lambda: not (self._left() or self._broken() or self._programs()), STOP_S,
            "jobs, their programs or nodes do not end",
        )  # fmt: skip

    def _programs(self) -> list[str]:
        """Return the names of what runs beside the daemons: the processes of jobs."""
        ended = (psutil.STATUS_ZOMBIE, ())
        running = [p for p in self._processes() if _observed(p.status) not in ended]
        return [name for p in running if (name := _observed(p.name)) and name not in DAEMONS]

    def _left(self) -> bool:
        jobs = ",".join(map(str, self.jobs))
        return bool(jobs and self.run("squeue", "--noheader", f"--jobs={jobs}"))

    def _broken(self) -> list[str]:
        def broken(state: str) -> bool:
            return state.startswith(("down", "drain")) or state.endswith("*")

        return [name for name, state in self.nodes().items() if broken(state)]

    def idle(self) -> bool:
        """Return whether no node has anything to do, and none is down."""
        return list(self.nodes().values()) == ["idle"] * len(NODES)


def _node_of(process: psutil.Process) -> str:
    """Return the node of a process; "?" of a daemon that has not opened its log, which tells."""
    if _observed(process.name) not in ("slurmd", "slurmstepd"):
        return dict(_observed(process.environ)).get("SLURMD_NODENAME", "")
    if _observed(process.status) in (psutil.STATUS_ZOMBIE, ()):
        return ""
    logs = (Path(file.path).stem.removeprefix("slurmd-") for file in _observed(process.open_files))
    return next((name for name in logs if name in NODES), "?")


def _observed(ask: Callable[[], T]) -> T | tuple[()]:
    """Return what is asked of a process; nothing where it has ended."""
    try:
        return ask()
    except psutil.Error:
        return ()


@cache
def _pmi() -> str:
    return "pmix" if find_mpi().vendor == "Open MPI" else "pmi2"


@contextmanager
def running(environ: Mapping[str, str]) -> Iterator[Slurm]:
    """Start a Slurm whose jobs see `environ`; it ends with the block, or with this process."""
    clean = {k: v for k, v in environ.items() if not k.startswith(OF_OTHERS)}
    # Sockets and a plugin need short paths: not below pytest's folder, and without a prefix.
    with tempfile.TemporaryDirectory(prefix="") as name:
        folder = Path(name)
        own = {**clean, "SLURM_CONF": f"{folder}/slurm.conf"}
        keeper = subprocess.Popen(
            [sys.executable, __file__, name, _pmi()], env=own, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # a signal to the group of the tests would leave its daemons
        )  # fmt: skip
        with keeper:
            try:
                if (message := keeper.stdout.readline()) != "up\n":
                    raise RuntimeError(f"Slurm did not start: {message}{keeper.stdout.read()}")
                yield Slurm(folder, own, keeper)
            finally:
                keeper.stdin.close()
                keeper.wait(STOP_S)


def _said_in(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("*.log"))


def main() -> None:
    """Start the daemons, wait for the end of stdin, and end all that runs below."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = Path(sys.argv[1])
    try:
        nodes = _start(folder, sys.argv[2])
        print("up", flush=True)
        for line in sys.stdin:
            if nodes[name := line.strip()].poll() is not None:
                nodes[name] = _node(folder, name)
    except TimeoutError as error:
        print(error, _said_in(folder), sep="\n", flush=True)
    finally:
        _end_all()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, mpi: str) -> dict[str, subprocess.Popen]:
    _configure(folder, mpi)
    munge = ["munged", "--foreground", f"--socket={folder}/munge.socket"]
    munge += [f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid"]
    munge += [f"--seed-file={folder}/munged.seed"]
    _daemon(folder, "munged", munge)
    until((folder / "munge.socket").exists, START_S, "munged does not start")
    _daemon(folder, "slurmctld.out", ["slurmctld", "-D"])
    nodes = {name: _node(folder, name) for name in NODES}
    slurm = Slurm(folder, os.environ)
    until(lambda: _answers(slurm) and slurm.idle(), START_S, "the nodes do not come up")
    return nodes


def _node(folder: Path, name: str) -> subprocess.Popen:
    """Start a node without a disk: what it had kept is gone, sockets of PMIx among it.

    PMIx looks up what its node runs by the host's name, which is none of Slurm's nodes. Open MPI is
    then told of no neighbours, and ends in MPI_Init where there are more than two ranks on a node.
    """
    for saved in (folder / f"spool-{name}", folder / "tmp" / name):
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir(parents=True)
    return _daemon(folder, f"slurmd-{name}.out", ["slurmd", "-D", "-N", name], PMIX_HOSTNAME=name)


def _answers(slurm: Slurm) -> bool:
    ping = subprocess.run(["scontrol", "ping"], env=slurm.environ, capture_output=True)
    return ping.returncode == 0


def _configure(folder: Path, mpi: str) -> None:
    folder.chmod(0o755)  # munge is for all users
    for name in ("state", "lib"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    _link_plugins(folder / "lib")
    host, (port, *ports) = socket.gethostname(), _free_ports(1 + len(NODES))
    nodes = [NODE.format(name=n, host=host, port=p) for n, p in zip(NODES, ports, strict=True)]
    told = {"host": host, "port": port, "user": getpass.getuser(), "folder": folder, "mpi": mpi}
    first_job = random.randrange(1, 60_000_000)
    text = CONF.format(nodes="\n".join(nodes), first_job=first_job, **told)
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(GPUS)


def _link_plugins(plugins: Path) -> None:
    """Fill a folder with Slurm's plugins, the one for PMIx changed to look there for libpmix.so.

    That name, which it opens, is in Debian's package for developers, and so is a whole compiler.
    """
    for plugin in PLUGINS.iterdir():
        (plugins / plugin.name).symlink_to(plugin)
    (plugins / "libpmix.so").symlink_to(PMIX / "libpmix.so.2")
    for plugin in PLUGINS.glob("mpi_pmix*.so"):
        code = plugin.read_bytes()
        old, new = (bytes(path) + b"\0" for path in (PMIX, plugins))
        assert len(new) <= len(old), f"{plugins} is longer than {PMIX}, which it replaces"
        (plugins / plugin.name).unlink()
        (plugins / plugin.name).write_bytes(code.replace(old, new.ljust(len(old), b"\0")))


def _free_ports(n: int) -> list[int]:
    """Return ports that nobody listens on, of those that Linux gives to no client."""
    while True:
        first = random.randrange(20000, 32000)
        if all(map(_free, range(first, first + n))):
            return list(range(first, first + n))


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _daemon(folder: Path, name: str, command: list[str], **environ: str) -> subprocess.Popen:
    with open(folder / f"{name}.log", "a") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PATH": SBIN, **environ},
        )  # fmt: skip


def _end_all() -> None:
    """Kill all processes below this one; those that lose their parents come up to us."""
    deadline = time.monotonic() + STOP_S
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in below:
            _kill(process.pid)
            with suppress(ChildProcessError):  # not ours to reap
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)


def until(condition, limit_s: float, otherwise: str | Callable[[], str]) -> None:
    """Wait until `condition()`; raise TimeoutError, which says `otherwise`, at the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            kind = otherwise() if callable(otherwise) else otherwise
            raise TimeoutError(f"{kind} after {limit_s} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
