"""Reading a finished run."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import run_on

from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three epochs on two ranks, and its summary."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    spec = recipe.load("digits", ["run.epochs=3"])
    return out, run_on("threads", 2, lambda w: runs.train(spec, w, out, False))[0]


def test_the_loaded_model_is_the_trained_one(finished):
    out, summary = finished
    spec = recipe.load(str(out / run_folder.RECIPE))
    test = spec.data.load(spec.run.seed).test
    right = runs.load(out).predict(test.x).argmax(1) == test.y
    assert right.mean() == summary["test_accuracy"]
    assert runs.evaluate(out, device="cpu") == pytest.approx(
        {key: summary[key] for key in ("test_loss", "test_accuracy")}
        | {"samples": len(test), "step": summary["steps"], "device": "cpu"}
    )


def test_the_recipe_beside_the_results_repeats_the_run(finished, tmp_path):
    out, summary = finished
    again = recipe.load(str(out / run_folder.RECIPE))
    repeated = run_on("threads", 2, lambda w: runs.train(again, w, tmp_path / "again", False))[0]
    assert repeated["params_sha256"] == summary["params_sha256"]
    assert (tmp_path / "again" / run_folder.RECIPE).read_text() == (
        out / run_folder.RECIPE
    ).read_text()


def test_rows_tell_the_rate_of_their_last_step_and_where_their_part_began(tmp_path):
    for epochs in (2, 3):  # 12 steps each; the second call goes on with the run of the first
        spec = recipe.load("digits", [f"run.epochs={epochs}"])
        run_on("threads", 2, lambda w, spec=spec: runs.train(spec, w, tmp_path / "run", True))
    rows = run_folder.rows(tmp_path / "run")
    assert [row["since_step"] for row in rows] == [0, 0, 24]
    # Warm-up until step 12, then half a cosine over the 12, and from step 24 over the 24, that
    # are left of the run as it was planned.
    half = 0.05 / 2
    expected = [0.05, *(half * (1 + np.cos(np.pi * at)) for at in (11 / 12, 23 / 24))]
    assert [row["rate"] for row in rows] == pytest.approx(expected, rel=1e-12)


def test_running_statistics_are_saved_and_used(tmp_path):
    change = ["model.kind=resnet20", "model.widths=", "model.blocks=1", "model.channels=[4]"]
    spec = recipe.load("digits", ["run.epochs=3", *change])
    out = tmp_path / "resnet"
    summary = run_on("threads", 2, lambda w: runs.train(spec, w, out, False))[0]
    loaded, fresh = runs.load(out), runs.build_model(spec, spec.data.load(0)).buffers
    replica = loaded.replica
    assert all((replica.arena.views(replica.arena.buffer)[k] != 0).any() for k in fresh)
    assert summary["test_accuracy"] > 0.2
    evaluated = runs.evaluate(out)
    assert evaluated["test_loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    replica.arena.buffer[...] = 1
    test = spec.data.load(0).test
    assert loaded.evaluate(test)["loss"] != pytest.approx(summary["test_loss"], rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["optimizer.micro_batches=3"], "expected a divisor of the batch of 128, seen 3"),
        (["optimizer.micro_batches=0"], "micro_batches"),
        (
            ["optimizer.micro_batches=2", "model.kind=resnet20", "model.widths="],
            "normalizes over the batch",
        ),
    ],
)
def test_micro_batches_that_would_change_the_result_are_refused(tmp_path, change, message):
    def train(world):
        spec = recipe.load("digits", ["run.epochs=1", *change])
        return runs.train(spec, world, tmp_path / "run", False)

    with pytest.raises(UsageError, match=message):
        run_on("threads", 1, train)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"recipe\.toml"):
        runs.load(tmp_path)


def test_a_run_without_a_checkpoint_is_refused(finished, tmp_path):
    (tmp_path / run_folder.RECIPE).write_text((finished[0] / run_folder.RECIPE).read_text())
    with pytest.raises(UsageError, match="holds no checkpoint"):
        runs.load(tmp_path)


def test_the_summary_says_what_the_contract_promises(finished):
    _, summary = finished
    promised = """status exit_code recipe engine algorithm transport world_size workers servers
        hosts epochs steps steps_redone samples samples_per_s wall_s compute_s wire_s wait_s
        bytes_sent_per_rank train_loss test_loss test_accuracy staleness_mean staleness_max
        staleness_histogram clock_gap_max dropped_gradients idle_fraction params_sha256 seed
        threads versions"""
    assert set(promised.split()) <= set(summary)
    assert (summary["status"], summary["exit_code"], summary["epochs"]) == ("done", 0, 3.0)
    assert summary["compute_s"] + summary["wait_s"] <= summary["wall_s"]
    assert summary["bytes_sent_per_rank"] > 0 and np.isfinite(summary["train_loss"])
