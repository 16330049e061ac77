"""`hpctrain doctor --job` in real jobs: a job without faults, and faults planted in some ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest

from hpctrain.cluster.netlab.netlab import unavailable_reason
from hpctrain.tools.doctor.job.cores import TOO_NOISY

pytestmark = [pytest.mark.processes, pytest.mark.either]
QUICK = {"OMP_NUM_THREADS": "1"}
ALGORITHMS = ("auto", "ring", "tree", "direct", "native")

# Each rank is spoilt in its own way, before anything is imported.
SPOILT = """
import os, sys, time
from pathlib import Path
rank, here, *arguments = sys.argv[1:]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
{faults}
sys.argv = ["hpctrain", *arguments]
from hpctrain.cli import main
main()
"""
SEVERAL = """
if rank == 0:
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "64"
if rank == 1:
    sys.path.insert(0, here + "/site")
if rank == 2:
    os.chdir(here + "/elsewhere")
"""
# The limit is for this stage alone, which all ranks have reached, and rank 0 always reports first.
SILENT = """
from hpctrain.tools.doctor.job import known_sums as sums, result
from hpctrain.watch.deadline import Watch
result.RANK_0_HEAD_START_S = 60
watches, begin, find = [], Watch.__init__, sums.find_failed_algorithms

def start(watch, *args, **options):
    watches.append(watch)
    begin(watch, *args, **options)

def fall_silent(world):
    world.link.barrier()
    if rank == 1:
        time.sleep(600)
    watches[-1]._timeout_s = 4
    return find(world)

Watch.__init__, sums.find_failed_algorithms = start, fall_silent
"""


@pytest.fixture
def spoilt(start, tmp_path):
    """Run `doctor --job` on three ranks after some Python on each; return how it ended and what."""

    def spoilt(faults, *arguments, ranks=3):
        file = tmp_path / "found.json"
        code, extra = SPOILT.format(faults=faults), ("doctor", "--job", "--json", file, *arguments)
        ended = start("-c", code, "-", tmp_path, *extra, ranks=ranks, env=QUICK).finish()
        return ended, json.loads(file.read_text())

    return spoilt


def checks(table):
    return {check["name"]: check for check in table["checks"]}


def test_a_sound_job(hpctrain, tmp_path):
    file = tmp_path / "found.json"
    arguments = ("--job", "--json", file, "--recipe", "digits", "--out", tmp_path / "runs")
    ended = hpctrain("doctor", *arguments, ranks=3, env=QUICK)
    table = json.loads(file.read_text())
    result = checks(table)
    wrong = [check for check in result.values() if check["verdict"] == "bad"]
    assert ended.returncode == bool(wrong) == table["exit_code"], ended.stdout + ended.stderr
    for name in ("MPI", "threads", "versions", "recipe", "ranks", "clocks", "sums", "disk"):
        assert result[name]["verdict"] == "ok", result[name]
    assert all(name in result["sums"]["seen"] for name in ALGORITHMS)
    assert [row["rank"] for row in table["ranks"]] == ["0", "1", "2"]
    assert {(ping["a"], ping["b"]) for ping in table["pings"]} == {(0, 1), (0, 2), (1, 2)}
    assert {core["core"] for core in table["cores"]} == os.sched_getaffinity(0)
    assert "local rank" in ended.stdout and "speed of cores" in ended.stdout
    assert ended.stderr.count("doctor:") == 7  # a line per stage, from one rank
    assert [path.name for path in tmp_path.iterdir() if "doctor" in path.name] == []


def test_several_faults_at_once(spoilt, tmp_path):
    about = tmp_path / "site" / "mpi4py-9.9.9.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 9.9.9\n")
    (tmp_path / "elsewhere").mkdir()
    from hpctrain.training import recipe

    own = recipe.load("digits").toml()
    (tmp_path / "mine.toml").write_text(own)
    (tmp_path / "elsewhere" / "mine.toml").write_text(own.replace("seed = 0", "seed = 1"))
    script = tmp_path / "train.py"
    script.write_text("from mpi4py import MPI\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'")
    ended, table = spoilt(SEVERAL, "--recipe", "mine.toml", "--script", script)
    assert ended.returncode == table["exit_code"] == 1, ended.stderr
    result = checks(table)
    for name, words in {
        "versions": "but rank 1 on",
        "recipe": "but rank 2 on",
        "BLAS threads": "BLAS threads on",
        "CUDA_VISIBLE_DEVICES": "line 2 sets it after line 1",
    }.items():
        assert result[name]["verdict"] == "bad", result
        assert words in result[name]["seen"] and result[name]["remedy"]
    assert "9.9.9" in result["versions"]["seen"]
    assert "BLAS threads: unset OMP_NUM_THREADS" in ended.stdout


def test_a_rank_that_does_not_answer_is_named(spoilt):
    ended, table = spoilt(SILENT)
    assert ended.returncode != 0
    silent = checks(table)["answers"]
    assert silent["verdict"] == "bad"
    assert "the job waits for:\n  rank 1 on" in silent["seen"]
    assert "alive, computing" in silent["seen"]
    assert "versions" in checks(table)  # and what was found before is told
    assert "rank 1 on" in ended.stdout


def test_ranks_of_another_launcher(hpctrain, tmp_path):
    """They are two jobs of one rank; this is the first of them."""
    reported = {"RANK": "0", "LOCAL_RANK": "0", "SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in reported.items()}
    ended = hpctrain("doctor", "--job", "--json", tmp_path / "x", env=environ | QUICK)
    assert ended.returncode == 1, ended.stderr
    launcher = checks(json.loads((tmp_path / "x").read_text()))["launcher"]
    assert launcher["verdict"] == "bad"
    assert "these are 2 jobs of one rank" in launcher["seen"]
    assert "hpctrain launch -n 2 doctor --job" in launcher["remedy"]


SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def test_a_node_that_is_busy_does_not_pass(hpctrain, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    lines = [[sys.executable, "-c", SPIN, str(core)] for core in cores for _ in range(3)]
    busy = [subprocess.Popen(line, start_new_session=True) for line in lines]
    try:
        hpctrain("doctor", "--job", "--json", tmp_path / "x", ranks=2, env=QUICK, timeout=100)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    result = checks(json.loads((tmp_path / "x").read_text()))["speed of cores"]
    assert result["verdict"] == "slow"
    assert result["seen"].count(": something else runs there") == min(len(cores), 4)  # named
    assert "awk '$1 == " in result["remedy"] and "too noisy to conclude" in result["seen"]


@cache
def refused():
    return unavailable_reason()


SHAPED = """
[ $(hostname) = h3 ] && tc qdisc replace dev lab root tbf rate 150mbit burst 65536 latency 50ms
exec python -m hpctrain doctor --job --json "$1"
"""


def test_a_slow_link_is_named(hpctrain, tmp_path):
    if refused():
        pytest.skip(refused())
    file = tmp_path / "x"
    shell = ("sh", "-c", SHAPED, "-", file)
    ended = hpctrain("netlab", "--hosts", 3, "--", *shell, env=QUICK, timeout=100)
    table = json.loads(file.read_text())
    result = checks(table)["links between nodes"]
    if TOO_NOISY in checks(table)["speed of cores"]["seen"] and ended.returncode == 0:
        return  # it says that times decide nothing; test_slow_links_are_named counts
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert result["verdict"] == "bad"
    assert "h3" in result["nodes"]
    assert "rank 2 on h3 takes" in result["seen"]
    # On busy cores others may stand out as well: 'h[1,3]' is quoted for the shell; or all three.
    blamed = {node for check in table["checks"] for node in check["nodes"]}
    excluded = re.search("slow or broken nodes: --exclude='?h", ended.stdout)
    assert bool(excluded) == (blamed != {"h1", "h2", "h3"})


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--recipe", "digits"], "--recipe applies to a whole job: add --job"),
        (["--job", "--device", "tpu"], "--device"),
        (["--job", "--json", "/none/x"], "cannot be written"),
    ],
)
def test_refused(hpctrain, arguments, words):
    ended = hpctrain("doctor", *arguments)
    assert (ended.returncode, words in ended.stderr) == (2, True), ended.stderr
