"""Losses of ranks in the summary and the rows of a run, also of spares that wake up late."""

from __future__ import annotations

import gc
import json

import numpy as np
import psutil
import pytest

import hpctrain as ht
from hpctrain.cluster import launch
from hpctrain.training.run_options import FitOptions
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

STEPS = 80
SAMPLES = np.random.default_rng(0).standard_normal((64, 8), np.float32), np.arange(64) % 3
#: ranks that train, spares, n-th calls of the links at which ranks are killed
KILLS = {
    "none": (2, 1, {}),
    "without a spare": (3, 0, {1: 600}),
    "the first rank, then the spare in its place": (2, 2, {0: 300, 2: 600}),
    "one after the other, until no first rank is left": (2, 3, {0: 250, 1: 550, 2: 650}),
}


def train(link, spares, out):
    world = over_threads(link, spares=spares)
    model = ht.nn.Model([ht.nn.Linear(3)], input_shape=8)
    trainer = ht.Trainer(model, "sgd", world=world)
    return trainer.fit(
        SAMPLES, steps=STEPS, batch=16, out=out, options=FitOptions(interval_steps=5)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KILLS)
def test_each_loss_is_in_one_recovery_and_one_row(name, tmp_path):
    ranks, spares, kills = KILLS[name]
    results = run_ranks(ranks + spares, lambda link: train(link, spares, tmp_path), 20.0, kills)
    summary = next(result for result in results if result is not None)
    recoveries = summary["recoveries"]
    assert sorted(rank for entry in recoveries for rank in entry["ranks"]) == sorted(kills)
    joined = [rank for entry in recoveries for rank in entry["spares"]]
    assert joined == list(range(ranks, ranks + min(spares, len(kills))))
    assert summary["spares_used"] == len(joined)
    assert all(entry["steps_redone"] == 0 and entry["lost_s"] > 0 for entry in recoveries)
    assert summary["lost_s"] == pytest.approx(sum(entry["lost_s"] for entry in recoveries))
    assert summary["ettr"] == pytest.approx(1 - summary["lost_s"] / summary["wall_s"])
    assert summary["steps"] == STEPS
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["steps"] for row in rows) == STEPS
    assert sorted(rank for row in rows for rank in row.get("lost_ranks", [])) == sorted(kills)


LIMIT = 1.05  #: of descriptors and memory, to those after the first losses


@pytest.mark.parametrize("jobs", [3, pytest.param(67, marks=pytest.mark.full)])
def test_descriptors_and_memory_stay_flat_over_losses_of_thread_ranks(jobs, tmp_path):
    """Three ranks are lost in each job: 201 in 67 jobs."""
    ranks, spares, kills = KILLS["one after the other, until no first rank is left"]
    used = []
    for job in range(jobs):
        out = tmp_path / str(job)
        results = run_ranks(
            ranks + spares, lambda link, out=out: train(link, spares, out), 20.0, kills
        )
        assert len(next(filter(None, results))["recoveries"]) == len(kills)
        gc.collect()  # a killed thread closes nothing
        process = psutil.Process()
        used.append((process.num_fds(), process.memory_info().rss))
    first, last = used[0], used[-1]
    assert all(b <= LIMIT * a for a, b in zip(first, last, strict=True)), used


LOSSES = 20
CALLBACK = """
import os, signal
import psutil

NUMBER = int(os.environ["OMPI_COMM_WORLD_RANK"])

class Callback:
    def on_row(self, row):
        if row["step"] == 5 * NUMBER < 5 * 21:  # the last spare goes on
            os.kill(os.getpid(), signal.SIGKILL)
        process = psutil.Process()
        with open(f"used-{NUMBER}", "a") as file:
            print(row["step"], process.num_fds(), process.memory_info().rss, file=file)
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_descriptors_and_memory_stay_flat_over_losses_of_one_mpi_job(start, tmp_path):
    """Spare after spare takes the place of rank 1, and is killed there."""
    if not launch.find_mpi().ulfm:
        pytest.skip("this MPI has no ULFM")
    (tmp_path / "losses.py").write_text(CALLBACK)
    keys = (
        "run.epochs=", f"run.steps={5 * LOSSES + 5}", "run.interval_steps=1",
        "model.widths=[64,4,10]", 'run.callbacks=[{kind="losses:Callback", ranks="all"}]',
    )  # fmt: skip
    words = ("launch", "-n", 2, "--elastic", "--spares", LOSSES, "train", "digits")
    sets = [word for key in keys for word in ("--set", key)]
    ended = start("-m", "hpctrain", *words, *sets, "--out", "run").finish(900)
    assert ended.returncode == 0, ended
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (len(summary["recoveries"]), summary["spares_used"]) == (LOSSES, LOSSES)
    used = np.loadtxt(tmp_path / "used-0", dtype=int)
    first, last = used[used[:, 0] == 9][0], used[-1]
    assert (last[1:] <= LIMIT * first[1:]).all(), used
