"""How plain scripts of PyTorch end: killed, stopped, failing and mismatched ranks are named."""

from __future__ import annotations

import sys
import time

import psutil
import pytest
from limits import clock

from hpctrain.cluster.launch import find_mpi

LIMIT_S = 4
#: A DDP loop; rank 1 does `FAULT` at step 5.
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("hpctrain", timeout=timedelta(seconds={limit}))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000):
    if step == 5 and rank == 1:
        print("fault", flush=True)
        {fault}
    optimizer.zero_grad()
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    if step >= 5:
        time.sleep(0.01)
"""
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", None, []),
    "stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        1,
        [
            f"Timed out after {LIMIT_S} s",
            "rank 1 on",
            "stopped or dead",
            "all_reduce with all ranks",
        ],
    ),
    "exception": ("raise RuntimeError('planted')", 1, ["[rank 1 on", "RuntimeError: planted"]),
    "asleep": (
        "time.sleep(60)",
        1,
        [f"Timed out after {LIMIT_S} s", "rank 1 on", "alive, computing", "<string>:14"],
    ),
    "leaves": ("sys.exit(7)", None, [f"Timed out after {LIMIT_S} s", "): has ended its script"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_rank_ends_the_job_and_is_named(start, fault):
    code, exit_code, expected_words = FAULTS[fault]
    job = start("-c", SCRIPT.format(limit=LIMIT_S, fault=code), ranks=2)
    job.until("fault", timeout=60)
    ranks = job.ranks()
    ended = job.finish(timeout=LIMIT_S + 30)
    assert ended.returncode == exit_code or (exit_code is None and ended.returncode != 0)
    for words in expected_words:
        assert words in ended.stdout + ended.stderr
    deadline = clock() + 30
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks):
        assert clock() < deadline, "a rank was left"
        time.sleep(0.1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("fault", ["killed", "stopped", "exception", "leaves"])
def test_an_elastic_launcher_does_not_call_a_fault_a_success(start, fault, who, tmp_path):
    """A script does not go on after a loss, though the launcher of the job would."""
    if not find_mpi().ulfm:
        pytest.skip("this MPI has no ULFM")
    if (fault, who) == ("stopped", "all"):
        pytest.skip("a job that is stopped as a whole goes on later")
    code, _, expected_words = FAULTS[fault]
    if fault == "stopped":  # ranks of an elastic job observe each other
        expected_words = ["rank 1 (pid ", "state T, stopped by a signal"]
    text = SCRIPT.format(limit=LIMIT_S, fault=code)
    script = tmp_path / "script.py"
    script.write_text(text if who == "one" else text.replace(" and rank == 1", ""))
    words = ("launch", "-n", 2, "--elastic", "--", sys.executable, script)
    job = start("-m", "hpctrain", *words)
    job.until("fault", timeout=60)
    ranks = job.ranks()
    ended = job.finish(timeout=LIMIT_S + 60)
    assert ended.returncode != 0, ended
    if who == "one":
        for words in expected_words:
            assert words.replace("<string>", str(script)) in ended.stdout + ended.stderr
    assert "\x1e" not in ended.stdout + ended.stderr
    assert not psutil.wait_procs(ranks, timeout=30)[1]


BATCHES = """
import torch, torch.distributed as dist, hpctrain as ht
torch.set_num_threads(1)
dist.init_process_group("hpctrain")
model = {wrapped}
for step in range(10 - 5 * dist.get_rank()):
    model(torch.ones(3, 8)).sum().backward()
"""
WRAPPED = {
    "ddp": ("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))", "all_reduce "),
    "sync": ("torch.nn.Linear(8, 4); ht.torch.sync(model)", ""),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_ranks_with_different_numbers_of_batches_do_not_hang(start, kind):
    wrapped, call = WRAPPED[kind]
    ended = start("-c", BATCHES.format(wrapped=wrapped), ranks=2).finish(timeout=60)
    assert ended.returncode == 86
    assert f"hung: rank 1 has ended its script, rank 0 waits in {call}" in ended.stderr
    assert "(<string>:7): do ranks have different numbers of batches?" in ended.stderr


MISMATCH = """
import torch, torch.distributed as dist
dist.init_process_group("hpctrain")
{call}
"""
MISMATCHES = {
    "length": (
        "dist.all_reduce(torch.ones(3 + dist.get_rank()))",
        ["all_reduce sum of torch.float32 3", "all_reduce sum of torch.float32 4"],
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][dist.get_rank()]))",
        ["all_reduce sum of torch.float32 3", "all_reduce sum of torch.float64 3"],
    ),
    "call": (
        "x = torch.ones(3); [dist.all_reduce, lambda x: dist.broadcast(x, 0)][dist.get_rank()](x)",
        ["all_reduce sum of torch.float32 3", "broadcast from 0 of torch.float32 3"],
    ),
    "message": (
        "x = torch.ones(4 - dist.get_rank())\n"
        "dist.send(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)",
        ["receive from rank 0"],
    ),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_calls_that_differ_are_named_before_data_moves(start, mismatch):
    call, expected_words = MISMATCHES[mismatch]
    ended = start("-c", MISMATCH.format(call=call), ranks=2).finish(timeout=60)
    assert ended.returncode != 0
    for words in expected_words:
        assert words in ended.stderr
    assert ("different numbers of batches?)" in ended.stderr) == (mismatch != "message")


@pytest.mark.parametrize(
    "wait", ["", pytest.param(".wait()", marks=pytest.mark.full), ".get_future().wait()"]
)
def test_a_group_has_a_limit_of_its_own(start, wait):
    """Also for asynchronous calls, in which the thread of the group waits."""
    code = """
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("hpctrain", timeout=timedelta(seconds=60))
group = dist.new_group(timeout=timedelta(seconds=1))
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(1), group=group, async_op={is_async}){wait}
    except Exception as error:
        print("raised", *str(error).splitlines(), flush=True)
dist.barrier()
print("over", flush=True)
import os; os._exit(0)
"""
    code = code.format(is_async=bool(wait), wait=wait)
    ended = start("-c", code, ranks=2).finish(timeout=40)
    assert "rank 0: Timed out after 1 s in " in ended.stdout
    assert "rank 1 on" in ended.stdout
    assert ended.stdout.count("over") == 2
