"""The benchmark of training steps: equal losses, refusals, the losses of rivals."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, run_on

from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import step_times, training_step
from hpctrain.tools.bench.rivals import DenseModel
from hpctrain.training import recipe

COMPARED = Path(__file__).parents[3] / "benchmarks" / "mlp-10m.toml"
REQUESTED = {
    "algorithms": "direct",
    "rivals_text": "",
    "batches": "16",
    "model": "ours",
    "iterations": 2,
    "warm_up": 0,
    "json": None,
    "plot": None,
}


def asked(name="digits", sets=(), **changes):
    return training_step.parse_options(name, sets, **{**REQUESTED, **changes})


@pytest.mark.sample(2)
@on_ranks(1, 2, 3, mpi=(2, 3))
def test_all_ways_to_train_end_with_the_same_loss(ranks):
    expected = asked(algorithms="ring,direct,auto,share-parameters", batches="8,16")
    for rows in ranks(lambda world: training_step.run(world, expected)):
        names = ["ring", "direct", "auto", "share-parameters", "null"]
        assert [row["algorithm"] for row in rows] == names * 2
        assert all(row["correct"] for row in rows)
        assert {row["exposed_s"] is None for row in rows[4::5]} == {True}
        assert [row["batch_per_rank"] for row in rows[::5]] == [8, 16]


class Rival:
    """What a rival is to the benchmark, in NumPy: exact where `right`."""

    def __init__(self, world, right):
        self.world, self.right, self.about = world, right, "made up"

    def awake_context(self):
        return nullcontext()

    def step(self, dense: DenseModel, without_communication: bool):
        world, rate, momentum = self.world, dense.sgd_options["lr"], dense.sgd_options["momentum"]
        w = [(a.astype(np.float64), b.astype(np.float64)) for a, b in dense.layers]
        v = [[np.zeros_like(a), np.zeros_like(b)] for a, b in w]

        def together(x):
            if without_communication or not self.right:
                return x
            total = x.copy()
            world.link.endpoint.native.bind_allreduce(total, np.add)()
            return total / world.size

        def train(x, y):
            xs = [x.reshape(len(x), -1).astype(np.float64)]
            for a, b in w[:-1]:
                xs.append(np.maximum(xs[-1] @ a + b, 0))
            logits = xs[-1] @ w[-1][0] + w[-1][1]
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            loss = -np.log(p[np.arange(len(y)), y]).sum()
            p[np.arange(len(y)), y] -= 1
            dy = p / len(y)
            for i in reversed(range(len(w))):
                grads = together(xs[i].T @ dy), together(dy.sum(0))
                dy = (dy @ w[i][0].T) * (xs[i] > 0)
                for plane, speed, g in zip(w[i], v[i], grads, strict=True):
                    speed *= momentum
                    speed += g
                    plane -= rate * speed
            return loss

        return train


@pytest.mark.parametrize("right", [True, False])
def test_a_rival_that_trains_something_else_is_seen(right):
    plan, spec = asked(), recipe.load("digits")
    split = spec.data.load(0)
    model = spec.model.build(split.train.sample_shape, split.classes)

    def body(world):
        rivals = {"other": Rival(world, right)}
        return next(step_times.run(world, plan, model, split.train, rivals))

    for rows in run_on("threads", 2, body):
        by = {row["algorithm"]: row for row in rows}
        assert set(by) == {"direct", "null", "torch-null", "other"}
        assert by["direct"]["correct"] and by["other"]["correct"] is right
        assert by["direct"]["times"].keys() == {"other"}


REFUSED = {
    "algorithm": ({"algorithms": "dirct"}, "unknown algorithm 'dirct'; did you mean 'direct'?"),
    "nothing": ({"algorithms": "null"}, "--algorithms: expected one that communicates"),
    "rival": ({"rivals_text": "glo"}, "unknown rival 'glo'; did you mean 'gloo'?"),
    "batch": ({"batches": "0"}, "--batch-per-rank: expected numbers such as 32,128, seen '0'"),
    "no batch": ({"batches": None}, "use --batch-per-rank N"),
    "recipe": ({"name": "digts"}, "unknown recipe 'digts'"),
    "too large": ({"batches": "9999"}, "--batch-per-rank: expected at most 718 with 1437 samples"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_refused(wrong):
    changes, message = REFUSED[wrong]
    with pytest.raises(UsageError) as error:
        run_on("threads", 2, lambda world: training_step.run(world, asked(**changes)))
    assert message in str(error.value)


CANNOT = {
    "model": ("mnist", [], "mlp"),
    "clipping": ("digits", ["optimizer.clip_norm=1.0"], "clip_norm"),
    "optimizer": (
        "digits",
        ["optimizer.kind=adamw", "optimizer.momentum=", "optimizer.rate=0.001"],
        "sgd",
    ),
}


@pytest.mark.parametrize("subject", CANNOT)
def test_what_rivals_cannot_train_is_said(subject):
    name, sets, word = CANNOT[subject]
    assert word in step_times.rival_refusal(recipe.load(name, sets))


def test_the_recipe_of_the_comparison_has_ten_million_parameters():
    spec = recipe.load(str(COMPARED))
    assert step_times.rival_refusal(spec) is None
    assert sum(a * b + b for a, b in pairwise(spec.model.widths)) == 10_020_874


@pytest.mark.processes
@pytest.mark.either
def test_the_command(hpctrain, tmp_path):
    flags = ["--batch-per-rank", "16", "--iterations", "2", "--rivals", "gloo,horovod"]
    saved = tmp_path / "step.json"
    ended = hpctrain("bench", "step", "digits", *flags, "--json", str(saved), ranks=2)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(saved.read_text())
    assert all(row["correct"] for row in result["rows"])
    assert result["recipe"]["run"]["name"] == "digits" and set(result["rivals"]) == {
        "gloo",
        "horovod",
    }


@pytest.mark.parametrize(
    "changes, message",
    [({"model": "pytorch"}, "--model 'pytorch'"), ({"name": "mnist"}, "--model torch: only")],
)
def test_models_that_have_no_equal_in_pytorch_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        asked(**{"model": "torch", **changes})
