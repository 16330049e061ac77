"""Stop and resume: the bytes of an uninterrupted run; accuracy on real data."""

from __future__ import annotations

import random
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain import data
from hpctrain.core.errors import StoppedError, UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.core.signals import StopRequest
from hpctrain.training import recipe, runs

EPOCHS = 6
STEPS = 12 * EPOCHS


def spec(*overrides: str) -> recipe.Recipe:
    return recipe.load("digits", [f"run.epochs={EPOCHS}", "checkpoint.every_epochs=2", *overrides])


def train(world, out, resume=False, *overrides: str):
    return runs.train(spec(*overrides), world, out, resume)


@pytest.fixture
def stops(monkeypatch):
    """Let a rank be asked to stop once it has begun so and so many steps."""
    looked = StopRequest.requested if hasattr(StopRequest, "requested") else None
    assert looked is None  # it is an attribute of the object, so a property here goes before it

    def at(steps: int):
        observed = iter(range(10**6))
        monkeypatch.setattr(
            StopRequest, "requested", property(lambda self: next(observed) >= steps, _ignore), False
        )

    yield at


def _ignore(self, value) -> None:
    """Take no note: `requested` is what the test says."""


CHANGES = {
    "sgd": [],
    "adamw": ["optimizer.kind=adamw", "optimizer.momentum=", "optimizer.rate=0.001"],
    # What happens to images, and what is read ahead, must not depend on where a run began.
    "lamb": ["optimizer.kind=lamb", "optimizer.momentum=", "optimizer.rate=0.01",
             "optimizer.clip_norm=1.0", "data.shift=1", "data.flip=true", "run.prefetch=3"],
    # Running statistics are part of the state.
    "resnet": ["model.kind=resnet20", "model.widths=", "model.blocks=1", "model.channels=[4, 6]"],
    "shards": ["engine.shard_optimizer=true", "optimizer.kind=lamb", "optimizer.momentum=",
               "optimizer.rate=0.01"],
    "shared": ["engine.share_parameters=true", "checkpoint.keep_best=test_loss"],
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "size"),
    [
        ("sgd", 1),
        ("sgd", 2),
        ("sgd", 3),
        ("adamw", 2),
        ("lamb", 1),
        ("lamb", 3),
        ("resnet", 2),
        ("shared", 2),
    ],
)
def test_resumed_runs_end_with_the_same_bytes(tmp_path, stops, monkeypatch, size, change):
    change = CHANGES[change]
    complete = run_on("threads", size, lambda w: train(w, tmp_path / "whole", False, *change))[0]
    cut, completed = tmp_path / "cut", 0
    random.seed(f"{size} {change}")
    while True:
        stops(size * random.randint(5, 30))
        try:
            ends = run_on(
                "threads", size, lambda w, again=completed > 0: train(w, cut, again, *change)
            )
            break
        except StoppedError:
            completed += 1
        monkeypatch.undo()
    assert completed >= 2
    assert {item["params_sha256"] for item in ends} == {complete["params_sha256"]}
    buffers = [runs.load(folder).replica.arena.buffer for folder in (tmp_path / "whole", cut)]
    assert np.array_equal(*buffers)
    rows = run_folder.rows(cut)
    assert [r["step"] for r in rows] == sorted({r["step"] for r in rows})
    assert sum(row["steps"] for row in rows) == STEPS  # each step in exactly one row
    assert ends[0]["steps_redone"] == 0
    assert rows[-1]["samples"] == complete["samples"] == 1437 * EPOCHS


@pytest.mark.sample(1)
@pytest.mark.parametrize("saved", [2, 0])
def test_steps_after_the_last_checkpoint_are_done_again_and_counted(tmp_path, saved):
    """A killed job leaves rows of steps that no checkpoint holds, also before there is one."""
    out = tmp_path / "run"
    complete = run_on("threads", 1, lambda w: train(w, out))[0]
    for lost in (1, 2):
        for checkpoint in sorted((out / "checkpoints").glob("step-*"))[saved:]:
            shutil.rmtree(checkpoint)
        again = run_on("threads", 1, lambda w: train(w, out, True))[0]
        assert again["params_sha256"] == complete["params_sha256"]
        assert again["steps_redone"] == lost * (STEPS - 24 * saved)
        assert sum(row["steps"] for row in run_folder.rows(out)) == STEPS


def test_a_row_that_was_not_due_at_a_checkpoint_tells_of_all_its_steps(tmp_path):
    out = tmp_path / "run"
    often = ["checkpoint.every_epochs=", "checkpoint.every_steps=7", "checkpoint.keep=20"]
    run_on("threads", 2, lambda w: train(w, out, False, *often))
    complete = run_folder.rows(out)
    for lost in (out / "checkpoints").glob("step-*"):
        if int(lost.name.removeprefix("step-")) > 56:
            shutil.rmtree(lost)
    assert run_on("threads", 2, lambda w: train(w, out, True, *often))[0]["steps_redone"] == 16
    again = run_folder.rows(out)
    assert [row["steps"] for row in again] == [12] * EPOCHS
    losses = [row["train_loss"] for row in complete]
    assert [row["train_loss"] for row in again] == pytest.approx(losses, rel=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 1)])
def test_another_number_of_ranks_sees_the_same_batches(tmp_path, sizes, monkeypatch, stops):
    """In float64, 1e-10 of the way: sums are rounded in another order, and no more."""
    precise = "run.precision=float64"
    complete = run_on("threads", 1, lambda w: train(w, tmp_path / "whole", False, precise))[0]
    stops(sizes[0] * 30)
    with pytest.raises(StoppedError):
        run_on("threads", sizes[0], lambda w: train(w, tmp_path / "cut", False, precise))
    monkeypatch.undo()
    ends = run_on("threads", sizes[1], lambda w: train(w, tmp_path / "cut", True, precise))[0]
    assert ends["train_loss"] == pytest.approx(complete["train_loss"], rel=1e-9)
    models = [runs.load(tmp_path / name).replica.arena.param for name in ("whole", "cut")]
    assert abs(models[0] - models[1]).max() < 1e-10


@pytest.mark.full
@on_ranks(1, 3, mpi=(4,))
def test_digits_reaches_its_accuracy(ranks, tmp_path, monkeypatch):
    """The mean of 5 seeds is at least 0.97, whatever the number of ranks."""
    monkeypatch.chdir(tmp_path)
    accuracies = []
    for seed in range(5):
        seeded = recipe.load("digits", [f"run.seed={seed}"])
        for item in ranks(lambda w, seeded=seeded: runs.train(seeded, w, None, False)):
            accuracies.append(item["test_accuracy"])
    assert not accuracies or sum(accuracies) / len(accuracies) >= 0.97


def test_resuming_a_complete_run_changes_nothing(tmp_path):
    complete = run_on("threads", 2, lambda w: train(w, tmp_path / "run"))[0]
    before = run_folder.read_summary(tmp_path / "run")
    for again in run_on("threads", 3, lambda w: train(w, tmp_path / "run", True)):
        assert again == before == run_folder.read_summary(tmp_path / "run")
    assert before["wall_s"] == complete["wall_s"] > 0


def test_resuming_a_complete_run_removes_what_the_disk_did_not_let_go(tmp_path):
    run_on("threads", 1, lambda w: train(w, tmp_path / "run"))
    remaining = tmp_path / "run" / "checkpoints" / ".step-00000024.partial"
    remaining.mkdir()
    (remaining / "part-00000.safetensors").touch()
    run_on("threads", 1, lambda w: train(w, tmp_path / "run", True))
    assert not remaining.exists()


def test_a_resumed_run_tells_since_when_its_times_are(tmp_path):
    run_on("threads", 1, lambda w: train(w, tmp_path / "run"))
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    again = run_on("threads", 1, lambda w: train(w, tmp_path / "run", True))[0]
    assert (again["since_step"], again["steps"]) == (48, STEPS)


def test_a_run_beyond_the_last_step_keeps_its_summary(tmp_path):
    run = tmp_path / "run"
    done = run_on("threads", 1, lambda w: train(w, run))[0]

    def resume_for_fewer_epochs(world):
        with pytest.raises(UsageError, match=rf"is at step {STEPS}, beyond the last step 24 of"):
            train(world, run, True, "run.epochs=2")

    run_on("threads", 2, resume_for_fewer_epochs)
    assert run_folder.read_summary(run) == done


def test_rows_for_which_there_is_no_room_follow_when_there_is(tmp_path, monkeypatch, caplog):
    saved, calls = run_folder.append_row, []

    def full_twice(run, *rows):
        calls.append(rows)
        if len(calls) < 3:
            raise OSError(28, "No space left on device")
        saved(run, *rows)

    monkeypatch.setattr(run_folder, "append_row", full_twice)
    run_on("threads", 1, lambda w: train(w, tmp_path / "run"))
    assert caplog.text.count("metrics.jsonl of") == 2 and "No space left" in caplog.text
    assert sum(row["steps"] for row in run_folder.rows(tmp_path / "run")) == STEPS


class Drawn:
    """A user's function that draws without a fixed seed: rank 2 has other samples."""

    def load(self, seed, finite=True):
        x = np.full((50, 8, 8), float(threading.current_thread().name == "rank 2"), np.float32)
        return data.Split(data.Dataset(x, np.arange(50) % 10), None, 10)


def test_ranks_with_different_data_are_named(tmp_path):
    def body(world):
        threading.current_thread().name = f"rank {world.rank}"
        with pytest.raises(UsageError, match=r"training data .* must be the same.*rank 2 has"):
            runs.train(replace(spec(), data=Drawn()), world, tmp_path / "run", False)

    run_on("threads", 3, body)
