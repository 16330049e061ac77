"""The public names as users guess them: short forms, errors in our own words, short reprs."""

from __future__ import annotations

from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe, runs
from hpctrain.transport.threads.ranks import run_ranks
from hpctrain.world import over_threads

X = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
Y = np.arange(32) % 3


def layers() -> list:
    return [ht.nn.Linear(8), ht.nn.ReLU(), ht.nn.Linear(3)]


def model() -> ht.nn.Model:
    return ht.nn.Model(layers(), 4)


def alone(body):
    """Return `body(world)` on one rank that is a thread."""
    return run_ranks(1, lambda link: body(over_threads(link)))[0]


def test_a_program_in_short_forms():
    def body(link):
        with ht.Trainer(model(), "adamw", engine="allreduce", world=over_threads(link)) as trainer:
            summary = trainer.fit((X, Y), epochs=2, batch=8, evaluate=(X, Y))
            assert trainer.summary == summary and summary["steps"] == 8
            return trainer.predict(X), trainer.evaluate((X, Y))

    for outputs, metrics in run_ranks(2, body):
        assert outputs.shape == (32, 3) and outputs.dtype == np.float32
        assert metrics["accuracy"] == (outputs.argmax(axis=1) == Y).mean()
        assert metrics.keys() == {"loss", "accuracy"} and metrics["loss"] > 0


def test_short_forms_equal_the_long_ones():
    def train(model, optimizer, engine, samples):
        def body(world):
            trainer = ht.Trainer(model, optimizer, engine=engine, world=world)
            return trainer.fit(samples, steps=3, batch=8)["params_sha256"]

        return alone(body)

    names = dict(zip(("linear1", "relu1", "linear2"), layers(), strict=True))
    long = ht.nn.Model(names, (4,))
    engine = ht.engines.AllReduce()
    for name, optimizer in {"sgd": ht.optim.sgd(0.01), "adamw": ht.optim.adamw(0.001)}.items():
        expected = train(long, optimizer, engine, ht.data.Dataset(X, Y))
        assert train(model(), name, "allreduce", (X, Y)) == expected


def test_a_trainer_is_closed_at_the_end_of_its_block(monkeypatch):
    def body(world):
        with ht.Trainer(model(), "sgd", world=world) as trainer:
            closed = []
            monkeypatch.setattr(trainer.engine, "close", lambda: closed.append(True))
        return closed

    assert alone(body) == [True]


WRONG = {
    "a misspelt option": (lambda: ht.engines.PsAsync(server=1),
                          "unknown key in PsAsync: 'server'; did you mean 'servers'"),
    "an option by position": (lambda: ht.engines.AllReduce("ring"),
                              r"AllReduce takes its options by name, seen 'ring'; write AllRed"),
    "an option out of range": (lambda: ht.engines.LocalSgd(period=0), r"LocalSgd period: .*seen 0"),
    "a missing option": (lambda: ht.callbacks.EarlyStop(), "EarlyStop patience is missing"),
    "checkpoints": (lambda: ht.CheckpointOptions(evry_steps=1), "did you mean 'every_steps'"),
    "no layers": (lambda: ht.nn.Model("linear", 4), "layers: expected a list of layers"),
    "a class for a layer": (lambda: ht.nn.Model([ht.nn.ReLU], 4), r"such as ht.nn.Linear\(10\)"),
    "no shape at all": (lambda: ht.nn.Model(layers()), "input_shape: expected .*seen None"),
    "no shape": (lambda: ht.nn.Model(layers(), "4"), r"input_shape: expected the shape"),
    "a negative shape": (lambda: ht.nn.Model(layers(), (4, -1)), r"input_shape: .*seen \(4, -1\)"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_objects(wrong):
    make, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message) as raised:
        make()
    assert "pydantic" not in str(raised.value)


WRONG_TRAINERS = {
    "no model": ({"model": "mlp"},
        "model: expected an ht.nn.Model or a torch.nn.Module, seen 'mlp'; write"),
    "an unknown optimizer": ({"optimizer": "adam"},
        "unknown optimizer 'adam'; did you mean 'adamw'"),
    "an optimizer that needs a rate": ({"optimizer": "lamb"},
        r"write ht.optim.lamb\(rate=...\)"),
    "a function for an optimizer": ({"optimizer": ht.optim.sgd},
        "expected one such as ht.optim.sgd"),
    "an unknown engine": ({"engine": "all-reduce"},
        "unknown engine 'all-reduce'; did you mean"),
    "a class for an engine": ({"engine": ht.engines.PsSync},
        "the class PsSync; call it"),
    "own options without the methods of engines": (
        {"engine": SimpleNamespace(build=ht.engines.Single().build, algorithm="auto")},
        "engine: SimpleNamespace has no workers, must_fit, tree, updates_per_step: derive it"),
    "no samples": ({"samples": X},
        r"fit: expected a pair of arrays \(x, y\).* seen ndarray"),
    "labels that are no integers": ({"samples": (X, X[:, 0])},
        "expected integer class labels"),
    "too few outputs": ({"samples": (X, Y + 100)}, r", or give the model 1\d\d outputs$"),
    "unequal lengths": ({"samples": (X, Y[:3])},
        "32 samples but y has 3;"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TRAINERS)
def test_wrong_arguments_of_a_trainer(wrong):
    arguments, message = WRONG_TRAINERS[wrong]
    arguments = {"model": model(), "optimizer": "sgd", "engine": "allreduce", **arguments}
    samples = arguments.pop("samples", (X, Y))

    def body(world):
        with pytest.raises(UsageError, match=message):
            ht.Trainer(**arguments, world=world).fit(samples, epochs=1)

    alone(body)


def test_docs_list_the_public_names():
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert [name for name in ht.__all__ if f"`ht.{name}" not in page] == []


def test_reprs_are_short():
    def body(world):
        return [repr(world), repr(ht.Trainer(model(), "sgd", world=world))]

    assert repr(model()) == "Model(linear1, relu1, linear2: (4,) -> (3,), 67 parameters)"
    world, trainer = alone(body)
    assert world.startswith("World(rank 0 of 1 on ") and len(world) < 120
    assert trainer.startswith("Trainer(Model(linear1, ") and "AllReduce(" in trainer


@pytest.mark.parametrize("barrier", [ht.World.barrier, ht.barrier])
def test_a_barrier_waits_for_all_ranks(barrier):
    arrived = []

    def body(link):
        world = over_threads(link)
        arrived.append(link.rank)
        barrier(world)
        return len(arrived)

    assert run_ranks(4, body) == [4] * 4


def test_the_summary_of_a_model_is_a_table_of_its_layers():
    assert model().summary().splitlines() == [
        "layer             output shape  parameters",
        "linear1 (Linear)  (8,)                  40",
        "relu1 (ReLU)      (8,)                   0",
        "linear2 (Linear)  (3,)                  27",
        "total                                   67",
    ]


# An attribute that a user guesses -> the public name that is suggested
GUESSES = {
    "engines.LocalSGD": "LocalSgd",
    "optim.cosine": "schedules.cosine",
    "data.DataSet": "Dataset",
    "nn.Conv2D": "Conv2d",
    "EarlyStopping": "callbacks.EarlyStop",
    "Linear": "nn.Linear",
    "xyzzy": None,
}


@pytest.mark.parametrize("guess", GUESSES)
def test_an_unknown_attribute_suggests_a_public_name(guess):
    with pytest.raises(AttributeError) as error:
        attrgetter(guess)(ht)
    expected = f"; did you mean '{GUESSES[guess]}'?" if GUESSES[guess] else ""
    package = ".".join(["hpctrain", *guess.split(".")[:-1]])
    name = guess.split(".")[-1]
    assert str(error.value) == f"module '{package}' has no attribute '{name}'{expected}"


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed")
@pytest.mark.parametrize("name", ["Trainer", "sync", "Loss", "Model"])
def test_names_that_need_pytorch_name_the_extra(name):
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[torch\]'"):
        getattr(ht.torch, name)


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed")
def test_the_recipe_that_needs_pytorch_names_the_extra():
    spec = recipe.load("cnn-torch")
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[torch\]'"):
        runs.build_model(spec, spec.data.load(0))
