"""Horovod's operations on ranks of MPI: right, in any order, and never waited for in vain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "horovod_operations.py"
START = "import time, torch, hpctrain.horovod.torch as hvd; hvd.init(); rank = hvd.rank(); "
TENSOR = "torch.ones(1)"
#: With cores to spare a thread looks for messages while ranks compute.
THREADED = """
import runpy, sys
from hpctrain.horovod.torch import start
start.uses_threads = lambda world: True
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(1, marks=pytest.mark.full)])
def test_operations_dtypes_and_layouts(start, ranks):
    ended = start(SCRIPT, ranks=ranks).finish(timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 2600


def test_the_same_with_a_core_for_the_thread(start):
    ended = start("-c", THREADED, SCRIPT, ranks=3).finish(timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[1]) > 2600


#: By what is wrong: a script, what stderr says, and variables.
FAULTS = {
    "a tensor that a rank never submits": (
        f"hvd.allreduce({TENSOR}, name='late') if rank != 1 else time.sleep(1000)",
        ["allreduce 'allreduce.late': submitted by 2 ranks", "not by rank 1"],
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"},
    ),
    "a warning before": (
        f"time.sleep(6 * (rank == 1)); hvd.allreduce({TENSOR}, name='late'); sys.exit(7)",
        ["submitted by 2 ranks 1 s ago, not by rank 1"],
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"},
    ),
    "a warning of a late coordinator": (
        f"time.sleep(6 * (rank == 0)); hvd.allreduce({TENSOR}, name='late'); sys.exit(7)",
        ["submitted 1 s ago, not by all ranks; rank 0 has not answered"],
        {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"},
    ),
    "an operation after one that timed out": (
        f"""
import numpy as np
from hpctrain.horovod.torch.job import state
link = state().world.link
if rank == 0:
    link.irecv(np.zeros(1), 1).wait()
try:
    hvd.allreduce({TENSOR}, name="late")
except hvd.HorovodInternalError:
    if rank == 1:
        link.isend(np.ones(1), 0).wait()
    hvd.broadcast({TENSOR}, 0)
""",
        ["not over within 8 s"],
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"},
    ),
    "an operation that failed on one rank alone": (
        f"""
from hpctrain.horovod.torch.job import state
runs = state().engines[0]._execution._runs
broadcast = runs["broadcast"]
if rank == 1:
    runs["broadcast"] = lambda entry: int("no memory")
try:
    hvd.broadcast({TENSOR}, 0)
except hvd.HorovodInternalError:
    runs["broadcast"] = broadcast
    hvd.broadcast({TENSOR}, 0)  # would receive the first
""",
        ["ValueError: invalid literal"],
        {},
    ),
    "the coordinator has left": (
        f"hvd.allreduce({TENSOR}) if rank else None",
        ["has ended"],
        {},
    ),
    "a rank that has shut down": (
        f"""
if rank == 1:
    hvd.allreduce_async({TENSOR}, name="alone")
    hvd.shutdown()
    time.sleep(1000)
hvd.allreduce({TENSOR})
""",
        ["Horovod has been shut down: rank 1 has ended or called hvd.shutdown()"],
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60"},
    ),
    "no number": (
        "",
        ["HOROVOD_FUSION_THRESHOLD: expected a number >= 0, seen 'much'"],
        {"HOROVOD_FUSION_THRESHOLD": "much"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_end_the_job(start, fault):
    script, expected, env = FAULTS[fault]
    ended = start("-c", f"import sys; {START}{script}", ranks=3, env=env).finish(timeout=200)
    assert ended.returncode != 0
    for words in expected:
        assert words in ended.stderr, ended.stderr


#: Ranks 0 and 1 reduce in a set of their own, while rank 2 waits for the files that they write.
APART = (
    START
    + f"""
import os, sys
own = hvd.add_process_set([0, 1])
for _ in range(50 * (rank < 2)):
    hvd.allreduce({TENSOR}, process_set=own)
open(sys.argv[1] + str(rank), "w").close()
while rank == 2 and not all(os.path.exists(sys.argv[1] + str(other)) for other in (0, 1)):
    time.sleep(0.01)
hvd.allreduce({TENSOR})
used_s = time.process_time()
time.sleep(1)
used_s = time.process_time() - used_s
assert used_s < 0.2, f"{{used_s}} s of CPU in a second without operations"
"""
)


def test_a_rank_outside_of_a_set_is_not_waited_for_and_idle_ranks_use_no_core(start, tmp_path):
    ended = start("-c", APART, tmp_path / "done", ranks=3).finish(timeout=200)
    assert ended.returncode == 0, ended.stderr


#: Begins again, also after an operation that other ranks did not submit, with sets of ranks.
AGAIN = (
    START
    + f"""
import sys
from hpctrain.horovod.torch.job import state
from hpctrain.transport.mpi import link as module
make, free, links, counts = module.MpiLink.__init__, module._free, [], []
def make_counted(*args, **options):
    links.append(0)
    make(*args, **options)
def free_counted(comm):
    links.pop()
    free(comm)
module.MpiLink.__init__, module._free = make_counted, free_counted
for i in range(5):
    own = hvd.add_process_set([0, 1])
    assert float(hvd.allreduce({TENSOR}, op=hvd.Sum)) == hvd.size()
    if hvd.rank() < 2:
        hvd.allreduce({TENSOR}, process_set=own)
    if rank == i % 3:
        hvd.allreduce_async({TENSOR}, name="alone")
    hvd.shutdown()
    try:
        exec(sys.argv[1])
    except ValueError:
        assert not hvd.is_initialized()
        hvd.init()
    counts.append((len(links), len(state().world.threads.sub_worlds)))
assert counts[1:3] == counts[3:], counts
"""
)


@pytest.mark.parametrize(
    "begin",
    ["hvd.init()", "hvd.init(comm=[[2, 1, 0], [0, 1, 2]][i % 2])",
     "hvd.init(process_sets=[hvd.ProcessSet([0, 9])])"],
)  # fmt: skip
def test_links_are_given_back_where_a_job_begins_again(start, begin):
    ended = start("-c", AGAIN, begin, ranks=3).finish(timeout=200)
    assert ended.returncode == 0, ended.stderr


#: A process that a rank forks ends while an operation of this rank is under way.
FORKED = (
    START
    + f"""
import os
handle = hvd.allreduce_async({TENSOR}) if rank else None
child = os.fork()
if child == 0:
    assert hvd.size() == 2
    raise SystemExit
assert os.waitpid(child, 0)[1] == 0
print(float(hvd.synchronize(handle or hvd.allreduce_async({TENSOR}))))
"""
)


def test_the_end_of_a_fork_is_not_the_end_of_a_rank(start):
    ended = start("-c", FORKED, ranks=2).finish(timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1.0", "1.0"]


def test_a_timeline_has_the_phases_of_each_operation(start, tmp_path):
    script = f"{START}hvd.allreduce({TENSOR}, name='x'); hvd.broadcast({TENSOR}, 0, name='y')"
    path = tmp_path / "timeline.json"
    ended = start("-c", script, ranks=2, env={"HOROVOD_TIMELINE": str(path)}).finish(timeout=100)
    assert ended.returncode == 0, ended.stderr
    events = json.loads(path.read_text())
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "allreduce.x", "broadcast.y",
    ]  # fmt: skip
    phases = [event["name"] for event in events if event["ph"] == "X"]
    assert phases == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_BROADCAST", "BROADCAST"]
