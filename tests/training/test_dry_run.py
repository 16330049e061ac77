"""A dry run: sizes are those of the training, and nothing is written or called."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from ranks import on_ranks, run_on

from hpctrain.cli import hpctrain
from hpctrain.training import recipe
from hpctrain.training.dry_run import dry_run

PARAMETERS = 64 * 8 + 8 + 8 * 10 + 10
SETTINGS = ["model.widths=[64,8,10]"]
# settings of digits, 1,437 samples in batches of 128 -> steps, and planes of the checkpoint
CASES = {
    "sgd with momentum": (["run.epochs=3"], 36, 2),
    "adamw": (["run.epochs=3", "optimizer.kind=adamw", "optimizer.momentum="], 36, 3),
    "steps": (["run.steps=7"], 7, 2),
    "sharded": (["engine.shard_optimizer=true", "run.epochs=3"], 36, 2),
    "ps-sync": (["engine.kind=ps-sync", "run.epochs=3"], 36, 2),
}
ROLES = {"ps-sync": "1 worker and 1 server, "}  # of the start line


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, mpi=(2,))
def test_sizes_are_those_of_the_training(ranks, case, tmp_path, monkeypatch):
    settings, steps, planes = CASES[case]
    monkeypatch.chdir(tmp_path)
    spec = recipe.load("digits", [*SETTINGS, *settings])
    for facts in ranks(lambda world: dry_run(spec, world, Path("runs/mine"))):
        assert (facts["steps"], facts["training_samples"], facts["test_samples"]) == (
            steps, 1437, 360,
        )  # fmt: skip
        exact_bytes = 4 * planes * PARAMETERS
        assert exact_bytes <= facts["checkpoint_bytes"] <= 1.5 * exact_bytes  # gaps of the arena
        assert facts["training_s"] == pytest.approx(facts["step_s"] * steps)
        assert facts["peak_bytes"] > 20e6 and facts["folder"] == "runs/mine"
        assert f"{ROLES.get(case, '')}{PARAMETERS:,} parameters" in facts["start"]
    assert list(tmp_path.iterdir()) == []


def test_no_callback_is_called(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("def callback(row):\n    raise RuntimeError('called')\n")
    monkeypatch.chdir(tmp_path)
    spec = recipe.load("digits", [*SETTINGS, 'run.callbacks=["trap:callback"]'])
    run_on("threads", 1, lambda world: dry_run(spec, world, None))
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", ["--resume", "--replay=runs/a", "--resume=runs/a"])
def test_a_dry_run_begins_a_new_training(option):
    result = CliRunner().invoke(hpctrain, ["train", "digits", "--dry-run", option])
    assert result.exit_code == 2 and "leave out --resume and --replay" in result.output
