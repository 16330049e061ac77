"""Sizes as users type them, recipes of trials, refusals before a run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from studies import SPEC, study

from hpctrain.commands.scale import scale
from hpctrain.core.errors import UsageError
from hpctrain.data import Dataset, resize_training_set
from hpctrain.data.dataset import Split
from hpctrain.tools.scaling import study as studies
from hpctrain.tools.scaling import trial_recipe
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.tools.scaling.trials import local_runner
from hpctrain.training import recipe

#: --ranks, --nodes, --ranks-per-node, --on: the sizes
TYPED = {
    ("1,2,4", None, None, "local"): [(1, 1), (2, 1), (4, 1)],
    ("4,1:2", None, None, "local"): [(1, 1), (2, 1), (4, 1)],
    ("2,1,2", None, None, "local"): [(1, 1), (2, 1)],
    (None, "1,2,4", None, "netlab"): [(1, 1), (2, 2), (4, 4)],
    (None, "1,2", 4, "slurm"): [(4, 1), (8, 2)],
    ("1,2,4", None, None, "netlab"): [(1, 1), (2, 2), (4, 4)],
    ("1,2,8,16", None, 8, "slurm"): [(1, 1), (2, 1), (8, 1), (16, 2)],
    ("2,4", "2", None, "netlab"): [(2, 2), (4, 2)],
    ("2,8", "1,2", None, "slurm"): [(2, 1), (8, 2)],
}


@pytest.mark.parametrize("typed", TYPED, ids=str)
def test_sizes(typed):
    assert trial_recipe.parse_sizes(*typed) == [Size(*item) for item in TYPED[typed]]


REFUSED = {
    (None, None, None, "local"): "scale needs sizes: --ranks 1,2,4 or --nodes 1,2,4",
    ("1,x", None, None, "local"): "--ranks: expected 1 to .* seen '1,x'",
    (None, "0", None, "netlab"): "--nodes: expected 1 to .* seen '0'",
    (None, "1,2", None, "local"): "this machine is one node",
    (None, "1,2", 0, "netlab"): "--ranks-per-node: expected 1 or more, seen 0",
    ("3", "2", None, "netlab"): "3 ranks on 2 nodes: .* seen 1.5; take 2 or 4 ranks",
    ("1", "2", None, "netlab"): "1 ranks on 2 nodes: .* take 2 ranks",
    ("2,4,6", "1,2", None, "netlab"): "expected one number, or one for each of 3 --ranks, seen 2",
    ("4", "2", 2, "netlab"): "leave it out",
}


@pytest.mark.parametrize("typed", REFUSED, ids=str)
def test_sizes_that_cannot_be(typed):
    with pytest.raises(UsageError, match=REFUSED[typed]):
        trial_recipe.parse_sizes(*typed)


@pytest.mark.parametrize("ranks, cores, threads, share", [
    (2, 2, 1, 1.0), (4, 2, 1, 2.0), (2, 2, 2, 2.0), (1, 8, 4, 1.0), (64, None, 1, 1.0),
])  # fmt: skip
def test_oversubscription(ranks, cores, threads, share):
    assert trial_recipe.ranks_per_core(Size(ranks), cores, threads) == share


FULL = """
schema = 1
[run]
name = "full"
epochs = 3
callbacks = ["module:function"]
evaluate_epochs = 1
[model]
kind = "mlp"
widths = [64, 16, 10]
[data]
kind = "digits"
[optimizer]
kind = "sgd"
rate = 0.05
batch_per_rank = 32
base_batch = 64
[early_stop]
metric = "test_loss"
patience = 2
[checkpoint]
every_epochs = 1
keep_best = "test_loss"
[trace]
enabled = true
"""


@pytest.fixture
def full(tmp_path):
    path = tmp_path / "full.toml"
    path.write_text(FULL)
    return recipe.load(str(path))


def test_a_trial_has_nothing_beside_its_steps(full):
    timing = Timing.of(100)
    assert (timing.interval, timing.first, timing.last, timing.total) == (10, 20, 120, 121)
    timed = trial_recipe.make_trial_recipe(full, "weak", 32, Size(4), timing)
    run = timed.run
    assert (run.epochs, run.steps, run.interval_steps, run.evaluate_steps) == (None, 121, 10, 121)
    assert run.epoch_samples == 121 * 4 * 32  # so that no epoch ends on the way
    assert (run.callbacks, timed.early_stop, timed.trace.enabled) == ([], None, False)
    assert (timed.checkpoint.every_epochs, timed.checkpoint.keep_best) == (None, None)
    assert (timed.batch.batch_per_rank, timed.batch.base_batch) == (32, 64)
    message = "\n".join(trial_recipe.describe_deviations(full, "weak", 32, timing, 1))
    for word in ("121 steps in place of 3 epochs", "20 to warm up, 100 timed", "callbacks",
                 "early stop, trace, keep_best", "OMP_NUM_THREADS=1"):  # fmt: skip
        assert word in message
    assert full.run.epochs == 3  # the recipe itself stays as it is


def test_batches_of_both_modes(full):
    four = [Size(2), Size(4)]
    assert (
        trial_recipe.choose_batch(SPEC, "strong", four)
        == trial_recipe.choose_batch(SPEC, "weak", four)
        == 128
    )
    assert trial_recipe.choose_batch(full, "weak", four) == 32
    assert trial_recipe.choose_batch(full, "strong", four) == 4 * 32
    timed = trial_recipe.make_trial_recipe(full, "strong", 128, Size(2), Timing(1))
    assert (timed.batch.batch, timed.batch.batch_per_rank, timed.batch.base_batch) == (
        128, None, None,
    )  # fmt: skip
    assert "batch = 128 in place of batch_per_rank = 32" in "\n".join(
        trial_recipe.describe_deviations(full, "strong", 128, Timing(1), None)
    )


def test_a_batch_that_ranks_cannot_share():
    with pytest.raises(UsageError, match=r"3 ranks: a batch of 128 is not divisible by 3 workers.*"
                       "--set optimizer.batch=126"):  # fmt: skip
        trial_recipe.check_divisible(SPEC, "strong", 128, [Size(1), Size(3)])
    trial_recipe.check_divisible(SPEC, "weak", 128, [Size(3)])


def test_servers_need_ranks():
    served = recipe.load("digits", ["engine.kind=ps-sync", "engine.servers=2"])
    with pytest.raises(UsageError, match=r"^2 ranks: "):
        trial_recipe.check_divisible(served, "strong", 128, [Size(2), Size(4)])


def test_a_set_of_another_length(tmp_path):
    short = recipe.load("digits").data.load(0).train
    three = Dataset(short.x[:3], short.y[:3])
    longer = resize_training_set(Split(three, None, 10), 5).train
    assert (len(longer), longer.sample_shape) == (5, three.sample_shape)
    assert (longer.rows(np.array([4]))[0] == three.x[1]).all()
    assert resize_training_set(Split(three, None, 10), None).train is three
    spec = recipe.load("digits", ["run.epoch_samples=256"])
    assert spec.run.epoch_samples == 256


#: words of the command line and what is said; nothing of it starts a rank
WRONG = {
    "--ranks 1,3": "128 is not divisible by 3",
    "--ranks 3,4": r"not divisible by 3 workers.*optimizer\.batch=120,",
    "--ranks 8,9": r"not divisible by 9 workers.*optimizer\.batch=72,",
    "--ranks 1,200": r"not divisible by 200 .*optimizer\.batch=200,",
    "--nodes 1 --on slurm --gpus-per-node 2 --ranks-per-node 4": "4 ranks on a node, and --gpus-",
    "--ranks 1 --repeats 0": "--repeats: expected 1 or more",
    "--ranks 1 --steps 0": "--steps: expected 1 or more",
    "--ranks 1 --link 1gbit": "--link shapes the links of a netlab; seen --on local",
    "--ranks 1 --on netlab --link fast": "--link fast: expected 1mbit",
    "--nodes 65 --mode weak --on netlab": "--hosts 65",
    "--ranks 1 --on slurm": "--on slurm: there is no sbatch on the PATH",
    "--ranks 1,2 --set engine.kind=gossip": "1 rank: engine 'gossip' needs at least 2 workers",
    "--ranks 2 --mode weak --set optimizer.batch=1 --set wire.reduction=ordered": "for 8 blocks",
    "--ranks 1 --set engine.kind=rings": "unknown .*'rings'",
    "--nodes 1 --on netlab --ranks-per-node 0": "--ranks-per-node: expected 1 or more, seen 0",
    "--ranks 1 --time 0:05:00": "--time is about jobs of Slurm; seen --on local",
    "--ranks 1 --gpus-per-node 0": "--gpus-per-node is about jobs of Slurm",
    "--ranks 1 --site=": "--site is about jobs of Slurm",
}


def test_the_remedy_for_an_uneven_batch_keeps_to_the_recipes_key():
    spec = recipe.load("digits", ["optimizer.batch=", "optimizer.batch_per_rank=7"])
    short = [Size(2), Size(3), Size(4)]
    with pytest.raises(UsageError, match=r"--set optimizer\.batch_per_rank=6,"):
        trial_recipe.check_divisible(
            spec, "strong", trial_recipe.choose_batch(spec, "strong", short), short
        )


@pytest.mark.parametrize("words", WRONG)
def test_what_the_command_refuses(words, monkeypatch, tmp_path):
    monkeypatch.setattr(local_runner.shutil, "which", lambda name: None)
    out = tmp_path / "study"
    with pytest.raises(UsageError, match=WRONG[words]):
        scale.main(["digits", *words.split(), "--out", str(out)], standalone_mode=False)
    assert not out.exists()


def test_ranks_do_not_start_studies(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(UsageError, match="this is rank 0 of 4"):
        local_runner.must_work("local", [Size(2)], None)


def test_a_study_comes_back_from_its_file(tmp_path):
    with studies.lock_folder(tmp_path / "study") as folder:
        assert folder.load() is None
        folder.save(study())
        assert folder.load() == study()


def test_a_study_may_grow(tmp_path):
    requested = study(sizes=(2, 8), repeats=2, steps=None)
    grown = studies.extend_study(requested, study(), tmp_path)
    assert [size.ranks for size in grown.sizes] == [1, 2, 4, 8]
    assert (grown.repeats, grown.steps) == (3, 100)


OTHER = {
    "mode": ({"mode": "weak"}, "mode was strong, now weak"),
    "recipe": ({"tables": SPEC.tables | {"schedule": {}}}, "tables.schedule was .* now {}"),
    "machine": ({"machine": {"cpu": "other", "cores": 8}}, "machine.cpu was made up, now other"),
    "steps": ({"steps": 50}, "trials of 100 timed steps, now 50"),
}


@pytest.mark.parametrize("subject", OTHER)
def test_another_study_is_refused(subject, tmp_path):
    changed, message = OTHER[subject]
    with pytest.raises(UsageError, match=f"holds another study: {message}"):
        studies.extend_study(replace(study(), **changed), study(), tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with (
        pytest.raises(UsageError, match=r"is not the folder of a study: it holds thesis\.tex"),
        studies.lock_folder(tmp_path),
    ):
        pass


def test_one_process_at_a_time(tmp_path):
    with (
        studies.lock_folder(tmp_path / "study"),
        pytest.raises(UsageError, match="is being written by process"),
        studies.lock_folder(tmp_path / "study"),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": 0}), '{"format": 1}'])
def test_a_damaged_study_is_refused(text, tmp_path):
    (tmp_path / studies.STUDY_FILE).write_text(text)
    with pytest.raises(UsageError, match="name a new folder"):
        studies.read_study(tmp_path / studies.STUDY_FILE)
