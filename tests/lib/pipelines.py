"""Models, samples and trainings for tests of pipelines: one body for every grid and schedule.

A training takes steps of 12, 12 and 3 samples: the last ones of an epoch are fewer than most
numbers of micro-batches, so that some micro-batches have no sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from ranks import MPI_RANKS

from hpctrain import data, engines, nn, optim
from hpctrain.parallel import MeshOptions, PipelineOptions
from hpctrain.training.run_options import FitOptions
from hpctrain.training.trainer import Trainer

SAMPLES, BATCH, STEPS, LENGTH = 27, 12, 5, 5


@dataclass(frozen=True)
class OwnScale:
    """A layer of a user: `backward` has five arguments and computes everything at once."""

    layer: str = ""  #: an earlier one, whose scale it shares

    def output_shape(self, shape):
        return shape

    def parameters(self, shape):
        shared = f"{self.layer}.scale" if self.layer else None
        return {"scale": nn.Parameter(shape, nn.layer.ones, shared_with=shared)}

    def forward(self, p, x, key):
        return x * p["scale"], x

    def backward(self, p, g, saved, dy, want_dx):
        np.sum(dy * saved, axis=0, out=g["scale"])
        return dy * p["scale"]


def mlp(layers: int, dropout: float = 0.0) -> nn.Model:
    return nn.MlpOptions(widths=[64, *[12] * (layers - 1), 10], dropout=dropout).build((8, 8), 10)


def own_layers(layers: int) -> nn.Model:
    own = {f"own{i}": OwnScale() for i in range(layers - 2)}
    return nn.Model({"flat": nn.Flatten(), "in": nn.Linear(9), **own, "out": nn.Linear(10)}, (8, 8))


def transformer(layers: int, tied: bool = True, **options: Any) -> nn.Model:
    """Return one with `layers` layers that have parameters of their own: table, places, norm."""
    blocks = max(1, layers - 3 - (not tied))
    made = nn.TransformerOptions(layers=blocks, width=4, heads=2, **options).build((LENGTH,), 256)
    out = {} if tied else {"out": nn.Linear(256, per_position=True)}
    return nn.Model(made.layers | out, made.input_shape)


def tied_twice(layers: int) -> nn.Model:
    """Return a model with a table and a scale that three layers each share, far from each other."""
    linear = nn.Linear(6, per_position=True)
    middle = [(f"own{i}", OwnScale()) for i in range(max(2, layers - 4))]
    half = len(middle) // 2
    ends = {"use a": nn.Unembedding("a", 256), "c": linear, "use b": OwnScale("b")}
    return nn.Model(
        {"a": nn.Embedding(256, 6), "b": OwnScale(), **dict(middle[:half]), **ends,
         **dict(middle[half:]), "d": linear, "use b last": OwnScale("b"),
         "use a last": nn.Unembedding("a", 256)},
        (LENGTH,),
    )  # fmt: skip


SGD, CLIPPED = optim.sgd(0.1, 0.9), optim.sgd(0.1, 0.9, clip_norm=0.5)
ADAMW, LAMB = optim.adamw(0.01, clip_norm=1.0), optim.lamb(0.01, clip_norm=1.0)
LARS = optim.lars(rate=0.5, weight_decay=1e-4, trust=0.02)
OPTIMIZERS = {"sgd": SGD, "clipped": CLIPPED, "adamw": ADAMW, "lars": LARS, "lamb": LAMB}
#: name: (function of the number of layers with parameters, optimizer, precision)
MODELS: dict[str, tuple[Callable[[int], nn.Model], str, Any]] = {
    "mlp": (mlp, "sgd", "float64"),
    "dropout": (lambda layers: mlp(layers, dropout=0.3), "adamw", "float32"),
    "own": (own_layers, "clipped", "float32"),
    "tied": (transformer, "adamw", "float32"),
    "untied": (lambda layers: transformer(layers, tied=False), "lamb", "float32"),
    "recompute": (lambda n: transformer(n, recompute=True, dropout=0.3), "lars", "float64"),
    "tied twice": (tied_twice, "lamb", "float64"),
}


@cache
def samples(kind: str, count: int = SAMPLES) -> data.Dataset:
    random = np.random.default_rng(count)
    if kind == "texts":
        texts = random.integers(0, 256, (count, LENGTH + 1), np.uint8)
        return data.Dataset(texts[:, :-1], texts[:, 1:])
    x = random.standard_normal((count, 8, 8)).astype(np.float32)
    return data.Dataset(x, random.integers(0, 10, count))


def samples_of(model: nn.Model, count: int = SAMPLES) -> data.Dataset:
    return samples("texts" if model.targets > 1 else "images", count)


@dataclass(frozen=True)
class Plan:
    """A training, but for the grid of its ranks."""

    model: str = "mlp"
    layers: int = 4  #: with parameters of their own
    micro_batches: int = 3
    engine: Any = engines.AllReduce()  # noqa: RUF009  (frozen)
    optimizer: str = ""  #: that of the model
    precision: str = ""
    steps: int = STEPS
    not_finite: Any = "stop"


class Outcome(NamedTuple):
    """The results that have to be the same on every grid."""

    sha256: str
    train_loss: float | None
    metrics: dict[str, Any]
    outputs: bytes  #: of `predict`


def trainer_of(world: Any, plan: Plan, pipe: int = 1, **pipeline: Any) -> Trainer:
    build, optimizer, precision = MODELS[plan.model]
    return Trainer(
        build(plan.layers),
        OPTIMIZERS[plan.optimizer or optimizer],
        plan.engine,
        precision=plan.precision or precision,
        world=world,
        mesh=MeshOptions(pipe=pipe),
        pipeline=PipelineOptions(**pipeline) if pipe > 1 else PipelineOptions(),
    )


def fit(trainer: Trainer, plan: Plan, **options: Any) -> dict[str, Any]:
    return trainer.fit(
        samples_of(trainer.replica.model),
        steps=plan.steps,
        batch=BATCH,
        micro_batches=plan.micro_batches,
        options=FitOptions(interval_steps=plan.steps, not_finite=plan.not_finite),
        **options,
    )


def train(world: Any, plan: Plan, pipe: int = 1, **pipeline: Any) -> Outcome:
    """Return the outcome of `plan` on a grid with `pipe` ranks per replica."""
    pipeline = {"balance": "even", **pipeline}
    with trainer_of(world, plan, pipe, **pipeline) as trainer:
        test = samples_of(trainer.replica.model, 7)
        summary = fit(trainer, plan, evaluate=test)
        metrics = {k: v for k, v in summary.items() if k.startswith("test_") and k != "test_s"}
        outputs = trainer.predict(test.x[:3]).tobytes()
    return Outcome(summary["params_sha256"], summary["train_loss"], metrics, outputs)


def on_grids(*grids: tuple[int, int], mpi: tuple[tuple[int, int], ...] = ()) -> Callable:
    """Parametrise a test with `ranks` and `grid`: (ranks of the data axis, ranks along pipe)."""
    rows = []
    for kind, own in (("threads", grids), ("mpi", mpi)):
        for grid in own:
            size = grid[0] * grid[1]
            marks = pytest.mark.mpi(min_size=size) if kind == "mpi" else ()
            assert kind == "threads" or size in MPI_RANKS
            name = f"{kind}-{grid[0]}x{grid[1]}-P{size}"
            rows.append(pytest.param((kind, size), grid, id=name, marks=marks))
    return pytest.mark.parametrize(("ranks", "grid"), rows, indirect=["ranks"])
