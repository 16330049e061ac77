"""Data loaders with worker processes beside ranks: no worker touches MPI, and none is left."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from limits import clock

pytestmark = pytest.mark.either

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        if {method!r} != "fork":
            mpi = sys.modules.get("mpi4py.MPI")
            assert mpi is None or not mpi.Is_initialized()
        time.sleep({pause})
        return torch.full((4,), float(i))

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("hpctrain")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    loader = DataLoader(Rows(), batch_size=8, num_workers={workers},
                        multiprocessing_context={method!r} if {workers} else None)
    total = 0.0
    for epoch in range({epochs}):
        for batch in loader:
            model(batch).sum().backward()
            total += batch.sum().item()
            print("batch", flush=True)
    sums = torch.tensor([total])
    dist.all_reduce(sums)
    print("total", sums.item(), flush=True)
    dist.destroy_process_group()
"""
TOTAL = 2 * 4 * sum(range(64))  # of two ranks


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for_end(processes: list[psutil.Process], limit_s: float = 10) -> None:
    deadline = clock() + limit_s
    while left := [process for process in processes if is_alive(process)]:
        assert clock() < deadline, f"left: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        pytest.param(0, "fork", marks=pytest.mark.full),
        (2, "fork"),
        (2, "forkserver"),
        pytest.param(2, "spawn", marks=pytest.mark.full),
    ],
)
def test_loaders_feed_ranks_and_leave_no_process(start, tmp_path, workers, method):
    script = tmp_path / "loaders.py"
    script.write_text(SCRIPT.format(workers=workers, method=method, pause=0, epochs=1))
    job = start(script, ranks=2)
    job.until("batch", timeout=90)
    processes = job.ranks()
    done = job.finish(timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"total {float(TOTAL)}") == 2
    wait_for_end(processes)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_no_worker_outlives_a_killed_rank(start, tmp_path, method):
    script = tmp_path / "loaders.py"
    script.write_text(SCRIPT.format(workers=2, method=method, pause=0.05, epochs=50))
    job = start(script, ranks=2)
    job.until("batch", timeout=90)
    processes = job.ranks()
    os.kill(processes[0].pid, signal.SIGKILL)
    assert job.finish(timeout=30).returncode != 0
    wait_for_end(processes, 20)


TRAINER = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
import hpctrain as ht

class Rows(Dataset):
    def __len__(self):
        return 70
    def __getitem__(self, i):
        mpi = sys.modules.get("mpi4py.MPI")
        info = get_worker_info()
        assert info is None or not (mpi and mpi.Is_initialized())
        assert info is None or (type(info.dataset) is Rows and info.dataset.begun == info.id)
        time.sleep({pause})
        return torch.full((4,), float(i) / 70) + torch.rand(4), i % 3

def begin(worker):
    get_worker_info().dataset.begun = worker

def train(workers):
    options = dict(num_workers=workers, worker_init_fn=begin) if workers else {{}}
    if {method!r} and workers:
        options["multiprocessing_context"] = {method!r}
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    loader = DataLoader(Rows(), batch_size=8, shuffle=True, **options)
    with ht.torch.Trainer(module, "sgd") as trainer:
        print("start", flush=True)
        summary = trainer.fit(loader, epochs={epochs}, batch=8, evaluate=loader)
    return summary["params_sha256"], summary["test_loss"]

{guard}:
    ends = train({workers}), train(0)
    assert ends[0] == ends[1], ends
    print("equal", flush=True)
"""
GUARD = 'if __name__ == "__main__"'


def write_trainer(folder, method="", workers=2, pause=0.0, epochs=3, guard=GUARD):
    script = folder / "trainer.py"
    options = {"method": method, "workers": workers, "pause": pause, "epochs": epochs}
    script.write_text(TRAINER.format(guard=guard, **options))
    return script


@pytest.mark.parametrize("method", ["", pytest.param("spawn", marks=pytest.mark.full)])
def test_workers_of_the_trainer_read_what_their_rank_would(start, tmp_path, method):
    job = start(write_trainer(tmp_path, method), ranks=2)
    job.until("start", timeout=90)
    processes = job.ranks()
    completed = job.finish(timeout=90)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.count("equal") == 2
    wait_for_end(processes)


def test_a_script_without_a_guard_is_refused_in_its_workers(start, tmp_path):
    completed = start(write_trainer(tmp_path, guard="if True"), ranks=2).finish(timeout=90)
    assert completed.returncode != 0
    assert "put the script's statements under" in completed.stderr


@pytest.mark.full
def test_workers_of_the_trainer_end_with_a_killed_rank(start, tmp_path):
    job = start(write_trainer(tmp_path, pause=0.05, epochs=50), ranks=2)
    job.until("start", timeout=90)
    time.sleep(5)
    processes = job.ranks()
    children = [child for rank in processes for child in rank.children(recursive=True)]
    os.kill(processes[0].pid, signal.SIGKILL)
    assert job.finish(timeout=30).returncode != 0
    wait_for_end([*processes, *children], 20)
