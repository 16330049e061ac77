"""Metrics of the outputs of modules and of functions of JAX, against their definitions."""

from __future__ import annotations

from copy import deepcopy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.nn import log_softmax
from ranks import on_ranks, run_on
from torch import nn

import hpctrain as ht
from hpctrain.core.errors import UsageError

pytestmark = pytest.mark.either
N = 41
DRAW = np.random.default_rng(2)
X = DRAW.standard_normal((N, 4)).astype(np.float32)
Y = np.concatenate([np.arange(3), DRAW.integers(0, 3, N - 3)])
BITS = np.concatenate([np.arange(2), DRAW.integers(0, 2, N - 2)])
MASKED = np.where(np.arange(N) % 5 == 4, -100, Y)
PLACES = np.stack([Y, (Y + 1) % 3, Y[::-1]], axis=1)  # labels of three places
CLASSES = ("auc", "f1_macro", "top_2", "confusion")


class Places(nn.Module):
    """Classes in axis 1, as PyTorch has them, of three places: of labels both axes may be."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 9)

    def forward(self, x):
        return self.layer(x).reshape(-1, 3, 3)


def flat(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, outputs), *[nn.Flatten(0)] * (outputs == 1))


#: module, loss, targets, metrics; outputs -> rows of logits; targets -> rows of those that count
ROWS = {
    "by name": (lambda: flat(3), "cross_entropy", Y, CLASSES, np.asarray, Y),
    "of PyTorch": (lambda: flat(3), nn.CrossEntropyLoss(), Y, CLASSES, np.asarray, Y),
    "ignored": (lambda: flat(3), nn.CrossEntropyLoss(), MASKED, CLASSES,
                lambda z: z[MASKED >= 0], MASKED[MASKED >= 0]),
    "places": (Places, nn.CrossEntropyLoss(), PLACES, CLASSES,
               lambda z: np.moveaxis(z, 1, 2).reshape(-1, 3), PLACES.ravel()),
    "one-hot": (lambda: flat(3), nn.CrossEntropyLoss(), np.eye(3, dtype="f4")[Y], CLASSES,
                np.asarray, Y),
    "one-hot places": (Places, nn.CrossEntropyLoss(),
                       np.moveaxis(np.eye(3, dtype="f4")[PLACES], -1, 1), CLASSES,
                       lambda z: np.moveaxis(z, 1, 2).reshape(-1, 3), PLACES.ravel()),
    "one logit": (lambda: flat(1), nn.BCEWithLogitsLoss(), BITS.astype(np.float32),
                  ("auc", "f1", "confusion"), lambda z: np.stack([0 * z, z], axis=1), BITS),
    "a probability": (lambda: nn.Sequential(flat(1), nn.Sigmoid()), nn.BCELoss(),
                      BITS.astype(np.float32), ("f1", "auc"),
                      lambda p: np.stack([0 * p, p - 0.5], axis=1), BITS),
    "probabilities of 0 and 1": (lambda: nn.Sequential(flat(1), nn.Hardtanh(0, 1)), nn.BCELoss(),
                                 BITS.astype(np.float32), ("f1", "auc"),
                                 lambda p: np.stack([0 * p, p - 0.5], axis=1), BITS),
    "a function": (lambda: flat(3), lambda z, y: nn.functional.cross_entropy(z, y), Y, CLASSES,
                   np.asarray, Y),
}  # fmt: skip


def pair_share(scores, is_positive) -> float:
    """Return the share of pairs whose positive has the larger score, ties counted half."""
    above = scores[is_positive][:, None] - scores[~is_positive]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def expected_metrics(names, logits, y) -> dict:
    p = np.exp(logits - logits.max(axis=1, keepdims=True).astype("f8"))
    p /= p.sum(axis=1, keepdims=True)
    matrix = np.zeros((p.shape[1],) * 2, int)
    np.add.at(matrix, (y, logits.argmax(axis=1)), 1)
    f1 = 2 * matrix.diagonal() / (matrix.sum(axis=0) + matrix.sum(axis=1))
    areas = [pair_share(p[:, k], y == k) for k in range(p.shape[1])]
    second = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    values = {
        "auc": areas[1] if len(areas) == 2 else np.mean(areas),
        "f1": f1[1],
        "f1_macro": f1.mean(),
        "top_2": (second == y[:, None]).any(axis=1).mean(),
        "confusion": matrix.tolist(),
    }
    return {name: values[name] for name in names}


@pytest.mark.parametrize("kind", ROWS)
@on_ranks(1, 3, mpi=(3,))
def test_metrics_of_modules(ranks, kind):
    make, loss, y, names, as_rows, counted = ROWS[kind]

    torch.manual_seed(3)
    built = make()

    def body(world):
        with ht.torch.Trainer(
            deepcopy(built), "sgd", loss=loss, world=world, metrics=names
        ) as trainer:
            summary = trainer.fit((X, y), steps=2, batch=16, evaluate=(X, y))
            return summary, trainer.predict(X)

    for summary, outputs in ranks(body):
        expected = expected_metrics(names, as_rows(outputs), counted)
        assert summary.get("test_confusion") == expected.pop("confusion", None)
        own = {name: summary[f"test_{name}"] for name in expected}
        assert own == pytest.approx(expected, rel=1e-12)


def test_metrics_of_modules_that_do_not_fit_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x), x

    all_but_one = 1 - np.eye(3, dtype="f4")[Y]
    rows = [
        (flat(1), nn.MSELoss(), BITS.astype(np.float32), "'auc' is of classes or labels"),
        (flat(3), nn.CrossEntropyLoss(), all_but_one, "CrossEntropyLoss are real numbers"),
        (Two(), lambda z, y: z[0].mean(), Y, "expected a tensor of outputs, seen tuple"),
    ]
    for module, loss, y, message in rows:

        def body(world, module=module, loss=loss, y=y):
            with ht.torch.Trainer(module, "sgd", loss=loss, world=world,
                                  metrics=["auc"]) as trainer:  # fmt: skip
                trainer.fit((X, y), steps=1, evaluate=(X, y))

        with pytest.raises(UsageError, match=message):
            run_on("threads", 1, body)


def jax_trainer(world, **keys):
    def predict(params, x):
        return x @ params["w"]

    def loss(params, x, y):
        losses = -jnp.take_along_axis(log_softmax(predict(params, x)), y[:, None], axis=1)
        return losses.mean(), {"largest": losses.max() * 0 + 7.0}

    params = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3) ** 3}
    keys = {"predict": predict, "metrics": ["largest", *CLASSES], **keys}
    return ht.jax.Trainer(loss, params, "sgd", world=world, **keys)


@on_ranks(1, 3, mpi=(3,))
def test_metrics_of_functions_of_jax(ranks):
    """Beside a metric that the loss returns itself."""

    def body(world):
        with jax_trainer(world) as trainer:
            summary = trainer.fit((X, Y), steps=2, batch=16, evaluate=(X, Y))
            return summary, trainer.predict(X)

    for summary, outputs in ranks(body):
        expected = expected_metrics(CLASSES, outputs, Y)
        assert summary["test_confusion"] == expected.pop("confusion")
        own = {name: summary[f"test_{name}"] for name in expected}
        assert own == pytest.approx(expected, rel=1e-12)
        assert summary["test_largest"] == pytest.approx(7.0)


def test_metrics_of_a_function_without_outputs_are_refused():
    def body(world):
        with jax_trainer(world, predict=None) as trainer:
            trainer.fit((X, Y), steps=1, evaluate=(X, Y))

    with pytest.raises(UsageError, match="metrics: expected predict=lambda params, x: "):
        run_on("threads", 1, body)
