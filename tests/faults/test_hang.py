"""`hpctrain hang`: the ranks of a live, a hung and a dead job; records of other nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import hpctrain as command
from hpctrain.core import atomic
from hpctrain.core.run_files.folder_lock import lock_folder
from hpctrain.tools.report import hang
from hpctrain.watch import WatchRecord, node_file
from hpctrain.watch.layout import HEARTBEAT, HEARTBEAT_OFFSET
from hpctrain.watch.node_file import Node, NodeFile

NOW = time.time()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable]:
    """Return a function that makes the records of nodes with the given ranks."""
    made_of: list[Node] = []

    def make(*of_nodes: list[int]) -> dict[int, WatchRecord]:
        token, size = uuid.uuid4().hex, sum(map(len, of_nodes))
        for number, ranks in enumerate(of_nodes):
            path = node_file.create(token, ranks[0], len(ranks))
            made_of.append(Node(f"n{number}", path, tuple(ranks)))
        node_file.publish(tmp_path / "watch", token, made_of)
        return {
            rank: WatchRecord(rank, size, NodeFile(node.file, len(node.ranks)).pages(index))
            for node in made_of
            for index, rank in enumerate(node.ranks)
        }

    yield make
    for node in made_of:
        Path(node.file).unlink(missing_ok=True)


def silence(record: WatchRecord, age_s: float) -> None:
    HEARTBEAT.pack_into(record._map, HEARTBEAT_OFFSET, time.time() - age_s, b"")


def as_dead(record: WatchRecord) -> None:
    """Let the record be that of a process that has ended, a minute ago."""
    silence(record, 60)
    process = record.snapshot().process.encode()
    at = bytes(record._map).index(process)
    record._map[at : at + 1] = b"x"  # no process has such a number


def show(run: Path, *options: str) -> str:
    result = CliRunner().invoke(command, ["hang", *options, str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def facts(run: Path, *options: str) -> dict:
    return json.loads(show(run, "--json", *options))


def lives(run: Path) -> list[str]:
    return [rank["life"] for rank in facts(run)["ranks"]]


def test_a_live_job(job, tmp_path, monkeypatch):
    records = job([0, 1, 2], [3])
    for rank, record in records.items():
        record.step = 5 if rank == 1 else 6
        entry = record.entry("main")
        for index in range(9):
            entry.enter(b"send", 2, index)
            entry.leave()
        if rank in (0, 2):
            entry.enter(b"sendrecv", 1, 4096)
    silence(records[2], 60)
    as_dead(records[3])
    descriptor = lock_folder(tmp_path)
    try:
        job_facts = facts(tmp_path)
        assert lives(tmp_path) == ["alive", "alive", "stopped", "dead"]
        assert (job_facts["status"], job_facts["behind"]) == ("running", [1])
        assert (job_facts["waited_for"], job_facts["silent_first"]) == ([1], [2])
        assert job_facts["remedy"] == ["nothing hangs: no wait of over 10 s"]
        assert [len(rank["calls"]) for rank in job_facts["ranks"]] == [8] * 4
        text = show(tmp_path, "-n", "3")
        monkeypatch.setattr(hang, "_LONG_S", -1)
        assert re.fullmatch(
            r"1 of 4 ranks waits at sendrecv \(.*\); rank 1 is where the bug is \(alive, perhaps "
            r"only slow\); ranks 2-3 do not wait either",
            facts(tmp_path)["remedy"][-1],
        )
        assert "others wait for: rank 1" in text and "in sendrecv with rank 1, 4,096" in text
        assert text.count("step 6  send with rank 2") == 2 + 2 + 3  # a wait is one of three
        refused = CliRunner().invoke(command, ["hang", "--collect", str(tmp_path)])
        assert refused.exit_code and "its job runs" in str(refused.exception)
    finally:
        os.close(descriptor)
    assert facts(tmp_path)["status"] == "killed"


def test_a_dead_job_whose_node_is_lost(job, tmp_path):
    records = job([0, 1], [2, 3])
    for record in records.values():
        record.entry("main").enter(b"barrier", -1, 0)
    records[1].entry("main").leave()
    Path(node_file.read_nodes(tmp_path / "watch")[1].file).unlink()
    collected = CliRunner().invoke(command, ["hang", "--collect", str(tmp_path)])
    assert (collected.exit_code, collected.output) == (0, "node n1: no records here\n")
    assert not Path(node_file.read_nodes(tmp_path / "watch")[0].file).exists()
    job_facts = facts(tmp_path)
    assert lives(tmp_path) == ["dead", "dead", "unknown", "unknown"]
    assert job_facts["unread_nodes"] == ["n1"] and job_facts["died_in_call"] == [0]
    assert job_facts["waited_for"] == [1, 2, 3]
    text = show(tmp_path)
    assert "node n1: its records are neither" in text and "--resume" in text


def test_a_folder_without_records(tmp_path):
    result = CliRunner().invoke(command, ["hang", str(tmp_path)])
    assert result.exit_code and "expected records of its ranks" in str(result.exception)
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / node_file.NODES).write_text('{"nodes": [{"name": 3}]}')
    result = CliRunner().invoke(command, ["hang", str(tmp_path)])
    assert result.exit_code and "expected the nodes of a job" in str(result.exception)


@pytest.mark.parametrize("name", ["/etc/passwd", "hpctrain-watch-1-00000", "/dev/null"])
def test_a_list_of_nodes_names_no_other_file(name, tmp_path):
    """The folder may be another user's: nothing else is read or removed."""
    victim = tmp_path / name.rpartition("/")[2]
    victim.write_text("data")
    nodes = [Node("n0", str(victim), (0,))]
    node_file.publish(tmp_path / "watch", "0" * 32, nodes)
    assert node_file.collect(tmp_path / "watch") == ["n0"]
    node_file.remove_earlier(tmp_path / "watch")
    assert node_file.read_records(tmp_path / "watch") == {} and victim.read_text() == "data"


def test_the_file_of_a_node_is_private_and_does_not_outgrow_a_full_disk(tmp_path, monkeypatch):
    path = node_file.create("a" * 32, 0, 2)
    try:
        assert os.stat(path).st_mode & 0o777 == 0o600
    finally:
        os.unlink(path)

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left.*/dev/shm or "):
        node_file.create("b" * 32, 0, 2)
    assert not list(Path("/dev/shm").glob("hpctrain-watch-bbbb*"))


# Two nodes of two ranks each. Rank 3 computes, or all ranks of its node are stopped.
NODES = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
os.environ["SLURMD_NODENAME"] = f"n{rank // 2}"
import hpctrain as ht

def computes():
    time.sleep(600)

from hpctrain.world import watched
world = ht.init()
assert world.host == f"n{rank // 2}", world.host
with watched(world, Path(sys.argv[1]), timeout_s=1):
    for step in range(3):
        world.threads.record.step = step
        world.barrier()
    if rank >= 2 and sys.argv[2] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        computes()
    world.barrier()
"""


@pytest.mark.sample(1)
@pytest.mark.processes
@pytest.mark.either
@pytest.mark.parametrize("does", ["computes", "stops"])
def test_records_of_other_nodes_reach_the_report(start, tmp_path, does):
    job = start("-c", NODES, tmp_path / "run", does, ranks=4)
    ended = job.finish()
    assert ended.returncode != 0
    node_file.remove_earlier(tmp_path / "run/watch")  # of a node that is stopped, nobody moves it
    report = json.loads((tmp_path / "run/watch/hung-report.json").read_text())
    assert [rank["rank"] for rank in report["ranks"] + report["missing"]] == [0, 1, 2, 3]
    text = (tmp_path / "run/watch/hung-report.txt").read_text()
    if does == "computes":
        assert (report["blocking"], report["waiting"]) == ([3], [0, 1, 2])
        assert "rank 3 on " in text and "computes: heartbeat" in text
        assert [rank["state"] for rank in facts(tmp_path / "run")["ranks"]] == ["dead"] * 4
        assert facts(tmp_path / "run")["waited_for"] == [3]
        assert re.fullmatch(
            r"3 of 4 ranks wait at barrier \(<string>:\d+ <module>\); rank 3 is where the bug is "
            r"\(alive, computing, perhaps only slow\)",
            text.splitlines()[-1],
        )
    else:
        assert report["missing"] == [{"rank": 2, "node": "n1"}, {"rank": 3, "node": "n1"}]
        assert "rank 3: no record came from its node n1: is the node lost?" in text
        assert text.endswith("where the bug is cannot be known: see ranks 2-3 (no record)")


@pytest.mark.processes
@pytest.mark.either
def test_launch_moves_the_records_of_a_dead_job(digits):
    job = digits("--epochs", "10000", ranks=2, launch=True)
    job.reach(20)
    (node,) = node_file.read_nodes(job.out / "watch")
    pid = node_file.read_records(job.out / "watch")[1].pid
    assert atomic.process_identity(pid) and Path(node.file).exists()
    os.kill(pid, signal.SIGKILL)
    ended = job.finish()
    assert ended.returncode == 1 and f"hpctrain hang {job.out}" in ended.stderr
    assert not Path(node.file).exists()
    result = facts(job.out, "-n", "64")
    assert [rank["life"] for rank in result["ranks"]] == ["dead", "dead"]
    assert all(rank["calls"] and rank["step"] >= 20 for rank in result["ranks"]), result
    assert result["status"] == "failed" and "a rank was lost" in result["reason"]


def test_the_module_of_the_command_needs_no_mpi():
    code = "import sys, hpctrain.tools.report.hang; print('mpi4py' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "False\n", ended.stderr
