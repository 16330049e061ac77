"""Weights by name: exported, read by other libraries, and used to start another run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from click.testing import CliRunner
from ranks import on_ranks, run_on

from hpctrain import checkpoint, data, nn, optim
from hpctrain.checkpoint import Piece
from hpctrain.commands.checkpoint import checkpoint as command
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import run_folder
from hpctrain.training import recipe, runs, weights
from hpctrain.training.trainer import Trainer
from hpctrain.transport.threads.ranks import run_ranks

RESNET = ["model.kind=resnet20", "model.widths=", "model.blocks=1", "model.channels=[4]"]
SMALL = ["model.widths=[64,16,10]", "run.epochs=1", "checkpoint.keep_best=test_loss"]
CREATED = {
    "float32": SMALL,
    "float64": [*SMALL, "run.precision=float64"],
    "buffers": [*SMALL[1:], *RESNET],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of one epoch on two ranks, by the names in MADE."""
    folder = tmp_path_factory.mktemp("made")

    def make(name):
        if not (folder / name).exists():
            spec = recipe.load("digits", CREATED[name])
            run_on("threads", 2, lambda w: runs.train(spec, w, folder / name, False))
        return folder / name

    return make


def export(run, *options):
    """Run the command, and return what it says and the error it ends with."""
    ended = CliRunner().invoke(command, ["export", str(run), *map(str, options)])
    return ended.output, ended.exception


def tensors_of(run):
    arena = runs.load(run).replica.arena
    return arena.views(arena.param) | arena.views(arena.buffer)


@pytest.mark.parametrize("name", CREATED)
@pytest.mark.parametrize("best", [False, True])
def test_exported_tensors_are_those_of_the_run(made, tmp_path, name, best):
    run, file = made(name), tmp_path / "weights.safetensors"
    message, error = export(run, "--output", file, *(["--best"] if best else []))
    assert error is None and message.startswith(str(file))
    tensors, expected = safetensors.numpy.load_file(file), tensors_of(run)
    assert tensors.keys() == expected.keys()
    for key, x in expected.items():
        assert (tensors[key].dtype, tensors[key].shape) == (x.dtype, x.shape)
        assert tensors[key].tobytes() == x.tobytes()
    assert {x.dtype.name for x in tensors.values()} == {CREATED[name][-1][-7:]} or name != "float64"
    with safetensors.safe_open(file, framework="numpy") as opened:
        about = opened.metadata()
    assert (about["format"], about["step"], about["recipe"]) == ("np", "12", "digits")
    assert about["recipe_sha256"] == recipe.load(str(run / run_folder.RECIPE)).sha256
    assert float(about["test_loss"]) > 0 and about["hpctrain"]


def test_torch_computes_the_same_from_what_was_exported(tmp_path):
    torch = pytest.importorskip("torch")
    read = pytest.importorskip("safetensors.torch").load_file
    layers = {"a": nn.Linear(3), "norm": nn.LayerNorm(), "relu": nn.ReLU(), "b": nn.Linear(2)}
    model = nn.Model(layers, (4,))
    samples = data.Dataset(np.eye(4, dtype=np.float32), np.arange(4) % 2)
    run = tmp_path / "run"
    run_on("threads", 2, lambda w: Trainer(model, optim.sgd(0.1), world=w).fit(
        samples, epochs=3, batch=2, out=run))  # fmt: skip
    observed = read(weights.export(run))
    a, norm, b = torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)
    for name, layer in {"a": a, "norm": norm, "b": b}.items():
        weight, bias = observed[f"{name}.weight"].t(), observed[f"{name}.bias"]
        layer.load_state_dict({"weight": weight, "bias": bias})
    with torch.no_grad():
        remote = b(torch.relu(norm(a(torch.eye(4))))).numpy()
    own = runs.load(run, model=model).predict(samples.x)
    assert abs(remote - own).max() < 1e-5


def test_an_export_lies_in_the_run_and_replaces_nothing_unasked(made, tmp_path):
    run = shutil.copytree(made("float32"), tmp_path / "run")
    file = run / "weights-step-00000012.safetensors"
    assert export(run)[1] is None
    complete = safetensors.numpy.load_file(file)
    file.write_text("precious")
    error = export(run)[1]
    assert isinstance(error, UsageError) and "exists; name another --output" in str(error)
    assert file.read_text() == "precious"
    for source in (run, run / "checkpoints" / "step-00000012"):
        assert export(source, "--force")[1] is None
        again = safetensors.numpy.load_file(file)
        assert all(np.array_equal(again[key], x) for key, x in complete.items())
        file.write_text("precious")
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == [".lock"]


REFUSED = {
    "no folder/w.safetensors": "cannot be written: No such file",
    "w.pt": r"w\.pt: an export is a safetensors file; name it .*w\.safetensors",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_export_that_cannot_be_written_is_refused(made, tmp_path, name):
    error = export(made("float32"), "--output", tmp_path / name)[1]
    assert isinstance(error, UsageError) and re.search(REFUSED[name], str(error))
    assert not (tmp_path / name).exists()


# What is made of a run, to begin another one with
SOURCES = {
    "run": lambda run, file: run,
    "checkpoint": lambda run, file: run / "checkpoints" / "step-00000012",
    "file": lambda run, file: weights.export(run, file),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["float32", "buffers"])
@on_ranks(1, 3, mpi=(2,))
def test_a_run_begins_with_the_weights_of_another(ranks, made, tmp_path, source, name):
    def body(world):
        paths = (made(name), tmp_path / "w.safetensors") if world.rank == 0 else ("", "")
        run, file = (Path(world.gather(str(path))[0]) for path in paths)
        path = world.gather(str(SOURCES[source](run, file) if world.rank == 0 else ""))[0]
        spec = recipe.load("digits", [*CREATED[name], f"model.init={path}"])
        model = runs.build_model(spec, spec.data.load(0))
        trainer = Trainer(model, optim.sgd(0.1), seed=7, world=world, init=spec.init)
        arena = trainer.replica.arena
        observed = {**arena.views(arena.param), **arena.views(arena.buffer)}
        trainer.close()
        return run, observed

    for run, observed in ranks(body):
        expected = tensors_of(run)
        assert all(np.array_equal(observed[key], x) for key, x in expected.items())
        assert observed.keys() == expected.keys()


def test_a_warm_start_trains_from_step_0_and_its_recipe_repeats_it(made, tmp_path, monkeypatch):
    def train(spec, out, size=2, resume=False):
        return run_on("threads", size, lambda w: runs.train(spec, w, tmp_path / out, resume))[0]

    monkeypatch.chdir(made("float32").parent)
    spec = recipe.load("digits", [*SMALL, "model.init=float32", "run.steps=", "run.epochs=2"])
    first = train(spec, "first")
    cold = train(recipe.load("digits", [*SMALL, "run.epochs=2"]), "cold")
    monkeypatch.chdir(tmp_path)
    again = train(recipe.load(str(tmp_path / "first" / run_folder.RECIPE)), "again")
    assert (first["steps"], first["steps_redone"]) == (24, 0)
    assert first["params_sha256"] == again["params_sha256"] != cold["params_sha256"]
    losses = [run_folder.rows(tmp_path / out)[0]["train_loss"] for out in ("first", "cold")]
    assert losses[0] < 0.9 * losses[1]


def test_resume_goes_before_init(made, tmp_path):
    source = shutil.copytree(made("float32"), tmp_path / "source")

    def train(out, resume, *extra):
        spec = recipe.load("digits", [*SMALL, f"model.init={source}", *extra])
        return run_on("threads", 2, lambda w: runs.train(spec, w, tmp_path / out, resume))[0]

    complete = train("whole", True)  # nothing there to resume: it begins with the source
    assert complete["params_sha256"] != run_folder.read_summary(source)["params_sha256"]
    shutil.rmtree(source)
    again = train("whole", True)
    assert again["params_sha256"] == complete["params_sha256"]
    with pytest.raises(UsageError, match="source: expected the folder of a run or of a checkpoint"):
        train("new", True)


GOOD = {"a.weight": np.ones((4, 3)), "a.bias": np.zeros(3), "b.weight": np.ones((3, 2)),
        "b.bias": np.zeros(2)}  # fmt: skip
# What is changed in a file of good tensors -> what is said
MISFITS = {
    "missing": ({"a.bias": None}, ["'a.bias': expected shape (3,), seen none"]),
    "shape": ({"b.weight": np.ones((2, 3))}, ["'b.weight': expected shape (3, 2), seen (2, 3)"]),
    "extra": ({"c.bias": np.ones(1)}, ["'c.bias': the model has none"]),
    "integers": ({"b.bias": np.ones(2, int)}, ["'b.bias': expected floating point, seen int64"]),
    "all": (
        {"a.bias": None, "b.bias": np.ones(9), "c.bias": np.ones(1)},
        ["'a.bias': expected", "'b.bias': expected", "'c.bias': the model has none"],
    ),
    "many": ({f"c{i}": np.ones(1) for i in range(14)}, ["'c5': the model has", "and 4 more"]),
}


def small_model():
    return nn.Model({"a": nn.Linear(3), "relu": nn.ReLU(), "b": nn.Linear(2)}, (4,))


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_do_not_fit_are_listed(tmp_path, misfit, size):
    change, message = MISFITS[misfit]
    tensors = {key: x for key, x in {**GOOD, **change}.items() if x is not None}
    safetensors.numpy.save_file(tensors, tmp_path / "w.safetensors")

    def body(world):
        Trainer(small_model(), optim.sgd(0.1), world=world, init=tmp_path / "w.safetensors")

    with pytest.raises(UsageError, match="do not fit the model") as error:
        run_on("threads", size, body)
    for line in message:
        assert str(error.value).count(line) == 1
    assert len(str(error.value).splitlines()) <= 1 + weights.MAX_FAULTS + 1


def test_weights_of_another_precision_fit(tmp_path):
    half = {key: x.astype(np.float16) for key, x in GOOD.items()}
    safetensors.numpy.save_file(half, tmp_path / "w.safetensors")
    trainer = run_on("threads", 1, lambda w: Trainer(
        small_model(), optim.sgd(0.1), world=w, init=tmp_path / "w.safetensors"))[0]  # fmt: skip
    arena = trainer.replica.arena
    assert arena.param.dtype == np.float32
    assert all(np.array_equal(x, GOOD[key]) for key, x in arena.views(arena.param).items())


def test_ranks_that_see_other_weights_are_told(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        changed = {**GOOD, "a.bias": np.full(3, float(rank))}
        safetensors.numpy.save_file(changed, tmp_path / str(rank) / "w.safetensors")

    def body(world):
        file = tmp_path / str(world.rank) / "w.safetensors"
        Trainer(small_model(), optim.sgd(0.1), world=world, init=file)

    with pytest.raises(UsageError, match=r"SHA-256 of the weights.*must be the same on all ranks"):
        run_on("threads", 2, body)


# What lies at the path -> what is said
NO_WEIGHTS = {
    "nothing": (None, "seen nothing"),
    "text": (b"weights", "cannot be read as a .safetensors file"),
    "no run": ("folder", "holds no checkpoint"),
}


@pytest.mark.parametrize("wrong", NO_WEIGHTS)
def test_paths_without_weights(tmp_path, wrong):
    made, message = NO_WEIGHTS[wrong]
    path = tmp_path / "w"
    if made == "folder":
        path.mkdir()
    elif made:
        path.write_bytes(made)
    with pytest.raises(UsageError, match=message):
        weights.read(path)


def test_a_damaged_checkpoint_is_refused_and_stays(made, tmp_path):
    complete = made("float32") / "checkpoints" / "step-00000012"
    path = shutil.copytree(complete, tmp_path / complete.name)
    part = path / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-3])
    with pytest.raises(UsageError, match=r"step-00000012 cannot be used: .*bytes; expected"):
        weights.read(path)
    assert path.exists()


def without(run, tmp_path, *keys):
    """Return a copy of a run whose checkpoint lacks `keys` in its manifest."""
    (result,) = run_ranks(1, lambda link: checkpoint.load(run, link))
    about = {key: value for key, value in result.about.items() if key not in keys}
    about["world_size"] = 1
    pieces = [Piece(name, 0, len(x), x) for name, x in result.arrays.items()]
    copy = tmp_path / "old"
    copy.mkdir()
    shutil.copy(run / run_folder.RECIPE, copy)
    run_ranks(1, lambda link: checkpoint.save(copy, result.step, pieces, about, link))
    return copy


def test_a_checkpoint_without_names_lends_no_weights(made, tmp_path):
    old = without(made("buffers"), tmp_path, "weights")
    for read in (weights.read, runs.load):
        with pytest.raises(UsageError, match="does not name its tensors"):
            read(old)


def test_a_run_is_loaded_without_its_data(made, tmp_path):
    run = shutil.copytree(made("float32"), tmp_path / "run")
    text = (run / run_folder.RECIPE).read_text()
    assert 'kind = "digits"' in text
    gone = text.replace('kind = "digits"', 'kind = "npz"\npath = "gone.npz"')
    (run / run_folder.RECIPE).write_text(gone)
    assert np.array_equal(
        runs.load(run).replica.arena.param, runs.load(made("float32")).replica.arena.param
    )


def test_a_run_without_a_recipe_is_loaded_with_its_model(tmp_path):
    samples = data.Dataset(np.eye(4, dtype=np.float32), np.arange(4) % 2)

    def body(world):
        trainer = Trainer(small_model(), optim.sgd(0.1), world=world, precision="float64")
        trainer.fit(samples, epochs=2, batch=2, out=tmp_path / "run")
        return trainer.replica.arena.param.copy()

    param = run_on("threads", 2, body)[0]
    loaded = runs.load(tmp_path / "run", model=small_model())
    assert loaded.replica.arena.param.dtype == np.float64
    assert np.array_equal(loaded.replica.arena.param, param)
    with pytest.raises(UsageError, match=r"has no recipe\.toml; .* ht\.load\(DIR, model=model\)"):
        runs.load(tmp_path / "run")
    other = nn.Model({"a": nn.Linear(2)}, (4,))
    with pytest.raises(UsageError, match=r"'a.weight': expected shape \(4, 2\), seen \(4, 3\)"):
        runs.load(tmp_path / "run", model=other)
