"""netlab: command lines as tables; real hosts that exchange messages and are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from hpctrain.cluster.launch import MpiInstallation, elastic_options, find_mpi
from hpctrain.cluster.netlab.namespaces import host_cores, shaping_command
from hpctrain.cluster.netlab.netlab import (
    Lab,
    build_command,
    parse_speed,
    rank_environment,
    unavailable_reason,
)
from hpctrain.collectives.chunks import SEGMENT_BYTES
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder

OPENMPI = MpiInstallation("Open MPI", "5", "/opt/libmpi.so", "/opt/mpiexec")
MPICH = MpiInstallation("MPICH", "5", "/opt/libmpi.so", "/opt/mpiexec")
MARK = "HPCTRAIN_TEST_NETLAB"


@cache
def refused() -> str | None:
    return unavailable_reason()


@pytest.fixture
def permitted():
    if refused():
        pytest.skip(refused())


@pytest.mark.parametrize(
    "word, bits",
    [("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("100mbit", 10**8), ("5000kbit", 5 * 10**6)],
)
def test_speeds(word, bits):
    assert parse_speed(word) == bits


@pytest.mark.parametrize("word", ["", "1", "1gb", "fast", "-1gbit", "0gbit", "1e3mbit", "999gbit"])
def test_other_speeds_are_refused(word):
    with pytest.raises(UsageError, match="expected 1mbit to 100gbit"):
        parse_speed(word)


@pytest.mark.parametrize("speed, burst", [("10mbit", 65536), ("1gbit", 250000), ("9gbit", 262144)])
def test_a_burst_is_short(speed, burst):
    assert f" burst {burst} " in shaping_command(parse_speed(speed), "eth0")


@pytest.mark.parametrize(
    "mpi, placed",
    [
        (OPENMPI, "--bind-to none --stdin none --host"),
        (MPICH, "-iface lab -ppn 2 -hosts"),
    ],
)
def test_command(mpi, placed):
    line = " ".join(build_command(mpi, Lab(3, 2, 10**9), ["python", "x.py"]))
    assert line.startswith("/opt/mpiexec ")
    assert line.endswith(f"{placed} 10.99.0.1:2,10.99.0.2:2,10.99.0.3:2 -n 6 python x.py")


def test_an_elastic_job_has_its_spares_in_the_lab():
    options = elastic_options(OPENMPI._replace(ulfm=True))
    line = " ".join(build_command(OPENMPI, Lab(2, 2, 10**9), ["x"], options))
    assert line.startswith("/opt/mpiexec --with-ft ulfm --mca coll ^han,cuda --prtemca ")
    assert line.endswith(" -n 4 x")


@pytest.mark.parametrize("vendor, mpiexec", [("Intel MPI", "/opt/mpiexec"), ("MPICH", None)])
def test_other_mpis_are_refused(vendor, mpiexec):
    with pytest.raises(UsageError, match="of Open MPI or MPICH"):
        build_command(MpiInstallation(vendor, "1", "", mpiexec), Lab(2, 1, 10**9), ["x"])


def test_a_users_own_settings_go_before_ours():
    supplied = {"OMPI_MCA_btl": "tcp,self", "UCX_TLS": "tcp", "SLURMD_NODENAME": "n1", "PATH": "/x"}
    own = rank_environment(OPENMPI, 2, supplied)
    assert own["OMPI_MCA_btl"] == "tcp,self"
    assert own["OMPI_MCA_coll"] == "^han"
    assert "SLURMD_NODENAME" not in own  # all hosts would have one name
    assert rank_environment(MPICH, 2, supplied)["UCX_TLS"] == "tcp"
    assert rank_environment(MPICH, 2, {})["UCX_TLS"] == "tcp,self"
    assert own["PATH"].endswith(":/x")


def test_more_ranks_than_cores_make_way_for_each_other():
    requested = {ranks: rank_environment(OPENMPI, ranks, {}) for ranks in (1, 1 + os.cpu_count())}
    assert ["OMPI_MCA_mpi_yield_when_idle" in item for item in requested.values()] == [False, True]


@pytest.mark.parametrize(
    "ranks_per_host, cores", [(1, [[4, 5], [6, 7]]), (2, [[4, 5], [6, 7]]), (3, [[4, 5, 6, 7]] * 2)]
)
def test_hosts_have_cores_of_their_own_where_these_suffice(ranks_per_host, cores):
    lab = {"hosts": 2, "ranks_per_host": ranks_per_host}
    assert [host_cores(host, lab, [4, 5, 6, 7]) for host in (1, 2)] == cores


def test_a_segment_is_sent_unasked():
    assert int(rank_environment(OPENMPI, 2, {})["OMPI_MCA_btl_tcp_eager_limit"]) > SEGMENT_BYTES


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--hosts 0 -- true", "--hosts 0: a netlab has 1 to 64 hosts"),
        ("--hosts 65 -- true", "--hosts 65"),
        ("--hosts 2 --ranks-per-host 0 -- true", "at least 1 rank"),
        ("--hosts 2 --link fast -- true", "--link fast: expected 1mbit to 100gbit"),
        ("--hosts 4 -- mpiexec -n 4 true", "leave mpiexec out: hpctrain netlab --hosts 4 --ranks"),
        ("--hosts 2 -- /opt/bin/mpirun -n 2 true", "netlab starts the 2 ranks itself, and each"),
        ("--hosts 2 --ranks-per-host 3 -- env A=1 srun true", "--hosts 2 --ranks-per-host 3 --"),
        ("--hosts 2 --spares 1 -- true", "--spares 1: only an elastic job has spares"),
        ("--hosts 2 --elastic --spares 1 --min-ranks 2 -- true", "--min-ranks: expected 1 to 1"),
        ("--hosts two -- true", "'two' is not a valid integer"),
        ("--hosts 2", "Missing argument"),
        ("-- true", "Missing option '--hosts'"),
    ],
)
@pytest.mark.either
def test_bad_input(hpctrain, arguments, message):
    ended = hpctrain("netlab", *arguments.split())
    assert (ended.returncode, message in ended.stderr) == (2, True), ended.stderr


@pytest.mark.processes
@pytest.mark.either
def test_without_tools_it_is_refused(hpctrain, tmp_path):
    ended = hpctrain("netlab", "--hosts", 2, "--", "true", env={"PATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "netlab needs Linux with ip, tc" in ended.stderr


SUBJECT = """
import os
import hpctrain
world = hpctrain.init()
told = f"{world.rank} of {world.size} on {world.host} {world.local_rank} in {os.getcwd()}"
print(told + "\\n", end="")  # in one write: ranks share a terminal
"""


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
def test_ranks_see_as_many_hosts(hpctrain, tmp_path):
    folder = tmp_path / "o'brien & $(co)"
    folder.mkdir()
    options = ("netlab", "--hosts", 2, "--ranks-per-host", 2, "--")
    ended = hpctrain(*options, "python", "-c", SUBJECT, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    places = ["h1 0", "h1 1", "h2 0", "h2 1"]
    reported = [f"{rank} of 4 on {place} in {folder}" for rank, place in enumerate(places)]
    assert sorted(ended.stdout.split("\n")) == ["", *reported]


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each host")
@pytest.mark.either
def test_what_runs_on_a_host_keeps_to_its_cores(hpctrain):
    line = ("grep", "Cpus_allowed_list", "/proc/self/status")
    ended = hpctrain("netlab", "--hosts", 2, "--", *line)
    assert len(set(ended.stdout.splitlines())) == 2, ended


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
@pytest.mark.either
def test_the_exit_code_is_the_commands(hpctrain):
    assert hpctrain("netlab", "--hosts", 2, "--", "sh", "-c", "exit 75").returncode == 75


LOST = "[ $OMPI_COMM_WORLD_RANK = 0 ] || "
ELASTIC_ENDS = {
    "all killed": ("kill -9 $$", 137),
    "one killed": (LOST + "kill -9 $$", 0),
    "one refused": (LOST + "exit 3", 3),
}


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ELASTIC_ENDS)
def test_the_exit_code_of_an_elastic_job_is_that_of_its_ranks(hpctrain, name):
    """Open MPI's mpiexec ends with 0 after the loss of all ranks."""
    if not find_mpi().ulfm:
        pytest.skip("this MPI has no ULFM")
    command, code = ELASTIC_ENDS[name]
    ended = hpctrain("netlab", "--hosts", 2, "--elastic", "--", "sh", "-c", command)
    assert ended.returncode == code, ended
    assert ("no rank came to its end" in ended.stderr) == (code == 137)
    assert "\x1e" not in ended.stderr


CUT = """
import os, subprocess

def cut(row):
    if row["step"] == 3 and os.environ["OMPI_COMM_WORLD_RANK"] == "2":
        subprocess.run(["ip", "link", "set", "lab", "down"], check=True)
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
def test_a_job_that_lost_a_host_ends_with_its_last_rank(hpctrain, tmp_path):
    """Open MPI's mpiexec waits for the daemon of the host, for eight minutes or for ever."""
    if not find_mpi().ulfm:
        pytest.skip("this MPI has no ULFM")
    (tmp_path / "cut.py").write_text(CUT)
    keys = ("run.epochs=", "run.steps=8", "run.interval_steps=1", "model.widths=[64,4,10]")
    keys += ('run.callbacks=[{kind="cut:cut", ranks="all"}]', "faults.step_ms=200")
    train = ("train", "digits", *(word for key in keys for word in ("--set", key)), "--out", "run")
    ended = hpctrain("netlab", "--hosts", 3, "--elastic", *train, timeout=150)
    assert ended.returncode == 0, ended
    assert ended.stderr.count("mpiexec, which waits for a lost host, is ended") == 1
    assert run_folder.read_summary(tmp_path / "run")["world_size"] == 2


def links() -> str:
    """Return the names of links and namespaces that the machine shows."""
    output = [["ip", "-brief", "link"], ["ip", "netns", "list"]]
    return "".join(subprocess.run(s, capture_output=True, text=True).stdout for s in output)


def marked() -> list[str]:
    """Return the processes that have our mark in their environment."""
    result = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={os.getpid()}\0".encode() in path.read_bytes():
                result.append(path.parent.name)
        except OSError:  # it has ended
            continue
    return result


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 130),
        (signal.SIGHUP, 130),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
@pytest.mark.either
def test_nothing_stays_behind(start, number, code):
    before = links()
    lab = ("-m", "hpctrain", "netlab", "--hosts", 2, "--", "sh", "-c", "hostname; exec sleep 300")
    job = start(*lab, env={MARK: str(os.getpid())})
    job.until("h1\n")
    job.until("h2\n")
    assert len(marked()) > 4
    assert links() == before  # nothing of it is seen here, so nothing of it can stay here
    job.process.send_signal(number)
    ended = job.finish()
    assert ended.returncode == code
    assert (f"netlab: stopped by {number.name}" in ended.stderr) == (code == 130)
    limit = time.monotonic() + 60
    while marked() and number == signal.SIGKILL and time.monotonic() < limit:
        time.sleep(0.02)  # nobody is left to wait for the kernel
    assert marked() == []
    assert links() == before


@pytest.mark.processes
@pytest.mark.usefixtures("permitted")
@pytest.mark.either
def test_two_labs_at_once(start):
    """They have the same addresses and names, each in a world of its own."""
    lab = ("-m", "hpctrain", "netlab", "--hosts", 2, "--", "sh", "-c", "echo here; exec sleep 1")
    jobs = [start(*lab) for _ in range(2)]
    ended = [job.finish() for job in jobs]
    assert [(e.returncode, e.stdout) for e in ended] == [(0, "here\nhere\n")] * 2
