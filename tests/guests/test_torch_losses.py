"""Losses of torch.nn under the Trainer: parameters are those of a plain loop, on any ranks.

Each row changes an argument of a loss, so that the parameters of the plain loop change too.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from guests.loss_rows import (
    BATCH,
    BCE,
    BITS,
    CE,
    COUNTS,
    GENERATOR,
    LABELS,
    MASKED,
    PLACES,
    REALS,
    ROWS,
    STEPS,
    N,
    Places,
    W,
    X,
)
from guests.torch_training import LIMIT, by_plain_loop, by_trainer, difference, make_module
from ranks import run_on
from torch import nn
from torch.nn import functional as F

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.data import order

pytestmark = pytest.mark.either


def double(make):
    return lambda: make().double()


def plain(loss, targets, make):
    def batches():
        per_epoch = -(-N // BATCH)
        for step in range(STEPS):
            epoch, i = divmod(step, per_epoch)
            indexes = order(0, epoch, N)[i * BATCH : (i + 1) * BATCH]
            yield torch.from_numpy(X[indexes]), torch.from_numpy(targets[indexes])

    return by_plain_loop(batches(), loss, double(make))


def by_hpctrain(ranks, loss, targets, make, **options):
    return by_trainer(
        ranks, lambda: (X, targets), BATCH, loss, double(make), steps=STEPS, **options
    )


def scaled(loss, targets, make):
    """Return the loss of a plain loop: the Trainer divides a sum by the samples of a step."""
    if getattr(loss, "reduction", "mean") == "sum":
        return lambda z, y: loss(z, y) / len(z), targets, make
    return loss, targets, make


@pytest.mark.parametrize("ranks", [3, *(pytest.param(p, marks=pytest.mark.full) for p in (1, 2))])
@pytest.mark.parametrize("name", ROWS)
def test_a_loss_gives_the_parameters_of_a_plain_loop(name, ranks):
    trained, _ = by_hpctrain(ranks, *ROWS[name])
    assert difference(trained, plain(*scaled(*ROWS[name]))) <= LIMIT


def test_rows_of_a_loss_differ():
    """So an argument that is dropped would be seen."""
    ends = defaultdict(list)
    for name, row in ROWS.items():
        if getattr(row[0], "reduction", "mean") != "sum":
            loss, targets, make = row
            with torch.no_grad():
                start = loss(make().double()(torch.from_numpy(X)), torch.from_numpy(targets))
            ends[name.split(",")[0]].append((plain(*row).tobytes(), start.item()))
    assert [name for name, states in ends.items() if len(set(states)) < len(states)] == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_class_weights_of_ours_are_those_of_pytorch(ranks):
    trained, summary = by_hpctrain(ranks, ht.nn.CrossEntropy(W.tolist()), LABELS, make_module)
    assert difference(trained, plain(CE(weight=W), LABELS, make_module)) <= LIMIT
    _, other = by_hpctrain(1, CE(weight=W), LABELS, make_module)
    assert summary["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)


WEIGHTED = {"weight": (CE(weight=W), LABELS), "masked": (CE(), MASKED)}


EVALUATED = WEIGHTED | {"full": (nn.PoissonNLLLoss(full=True), COUNTS)}  # which no gradient has


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_divides_by_the_weights(name):
    loss, targets = EVALUATED[name]
    modules = [make_module() for _ in range(3)]

    def evaluate(world):
        module = modules[world.rank]
        trainer = ht.torch.Trainer(module, "sgd", loss=loss, precision="float64", world=world)
        with trainer:
            return trainer.evaluate((X, targets))["loss"]

    expected = loss(make_module()(torch.from_numpy(X)), torch.from_numpy(targets)).item()
    for value in run_on("threads", 3, evaluate):
        assert value == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize(
    "engine, options",
    [
        (ht.engines.PsSync(placement="colocated"), {}),
        (ht.engines.AllReduce(shard_optimizer=True), {"micro_batches": 3}),
        (ht.engines.AllReduce(overlap="always", bucket_bytes=64), {}),
    ],
)
def test_engines_and_micro_batches_divide_by_the_weights_of_a_step(name, engine, options):
    trained, _ = by_hpctrain(3, *WEIGHTED[name], make_module, engine=engine, **options)
    assert difference(trained, plain(*WEIGHTED[name], make_module)) <= LIMIT


@pytest.mark.parametrize("name", WEIGHTED)
def test_ordered_sums_have_the_same_bytes_on_any_ranks(name):
    engine = ht.engines.AllReduce(reduction="ordered", blocks=4)
    ends = [
        by_hpctrain(ranks, *WEIGHTED[name], make_module, engine=engine)[0] for ranks in (1, 2, 3)
    ]
    assert ends[0].tobytes() == ends[1].tobytes() == ends[2].tobytes()
    assert difference(ends[0], plain(*WEIGHTED[name], make_module)) <= LIMIT


@pytest.mark.parametrize(
    "engine", ["local-sgd", "ps-async", ht.engines.Gossip(graph="ring"), "easgd"]
)
def test_workers_that_step_apart_divide_by_the_weights_of_their_own(engine):
    """So equal weights change nothing, however large."""
    large = CE(weight=torch.full((3,), 7.0, dtype=torch.float64))
    ends = [by_hpctrain(2, loss, LABELS, make_module, engine=engine)[0] for loss in (CE(), large)]
    assert difference(*ends) <= 1e-9


def test_a_count_of_ones_own_divides_the_sum():
    """Of a text with padding, say."""
    loss = ht.torch.Loss(
        lambda z, y: F.cross_entropy(z, y, W, reduction="sum"), "sum", count=lambda y: W[y].sum()
    )
    trained, summary = by_hpctrain(3, loss, LABELS, make_module)
    assert difference(trained, plain(CE(weight=W), LABELS, make_module)) <= LIMIT
    _, other = by_hpctrain(1, CE(weight=W), LABELS, make_module)
    assert summary["train_loss"] == pytest.approx(other["train_loss"], rel=1e-12)


@pytest.mark.parametrize("by_argument", [False, True])
def test_a_sum_is_trained_as_a_mean_and_said_so_unless_it_was_asked_for(caplog, by_argument):
    loss = nn.MSELoss(reduction="sum")
    by_hpctrain(2, ht.torch.Loss(loss, "sum") if by_argument else loss, REALS, make_module)
    warnings = [r for r in caplog.records if "reduction='sum' is divided by" in r.getMessage()]
    assert len(warnings) == (not by_argument)


class Counting(nn.MSELoss):
    """A loss that writes to itself: its last value, a count, and a buffer in place and anew."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("places", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs, targets):
        self.calls += 1
        self.places += len(outputs)
        loss = super().forward(outputs, targets)
        self.mean = loss.detach()
        return loss


def test_what_a_loss_writes_to_itself_is_kept():
    loss = Counting()
    by_hpctrain(1, loss, REALS, make_module)
    expected = Counting()
    plain(expected, REALS, make_module)
    assert (loss.calls, loss.places.item()) == (expected.calls, expected.places.item())
    assert loss.reduction == "mean" and loss.mean.item() > 0


def test_the_users_loss_is_not_changed_and_read_at_each_step():
    loss = CE(weight=W.float())
    by_hpctrain(2, loss, LABELS, make_module)
    assert loss.reduction == "mean" and loss.weight.dtype is torch.float32
    assert loss.weight.equal(W.float())


LOSS_WITH_PARAMETERS = nn.AdaptiveLogSoftmaxWithLoss(3, 3, [1])
REFUSALS = {
    "reduction": (CE(reduction="none"), LABELS, "expected reduction mean or sum, seen 'none'"),
    "parameters": (LOSS_WITH_PARAMETERS, LABELS, "expected one without parameters"),
    "linear": (nn.LinearCrossEntropyLoss(3, 3), LABELS, "expected one without parameters"),
    "other arguments": (nn.TripletMarginLoss(), REALS, "expected a function of outputs and"),
    "distances": (nn.TripletMarginWithDistanceLoss(), REALS, "expected a function of outputs"),
    "lengths": (nn.CTCLoss(), REALS, "expected a function of outputs and targets, seen CTCLoss"),
    "variances": (nn.GaussianNLLLoss(), REALS, "expected a function of outputs and targets"),
    "two inputs": (nn.CosineEmbeddingLoss(), REALS, "expected a function of outputs and targets"),
    "ranks of two": (nn.MarginRankingLoss(), REALS, "expected a function of outputs and targets"),
    "a function of three": (F.gaussian_nll_loss, REALS, "expected a function of outputs"),
    "targets to be broadcast": (nn.MSELoss(), REALS[:, :1], "which would be compared with"),
    "a weight per sample": (
        BCE(weight=torch.ones(2, 3, dtype=torch.float64)), BITS, "with a weight per sample",
    ),
    "complex": (lambda outputs, y: 1j * outputs.sum(), REALS, "seen torch.complex128 ()"),
    "too few weights": (CE(weight=W[:2]), LABELS, "weight"),
    "a mean with a count": ({"count": len}, LABELS, "expected reduction='sum' beside count"),
    "a mean that is no sum": (
        {"reduction": "sum"}, LABELS, "expected the reduction of the loss itself, 'mean'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    loss, targets, message = REFUSALS[name]
    with pytest.raises(UsageError) as error:
        if isinstance(loss, dict):
            loss = ht.torch.Loss(F.cross_entropy, **loss)
        by_hpctrain(2, loss, targets, make_module)
    assert message in str(error.value)


class Square(Places):
    """Outputs (n, 3, 3): classes in axis 1 or in axis 2."""

    def __init__(self, axis):
        super().__init__()
        self.body, self.axis = make_module(9), axis

    def forward(self, x):
        y = self.body(x).unflatten(1, (3, 3))
        return y if self.axis == 1 else y.transpose(1, 2)


SQUARE_LABELS = GENERATOR.integers(3, size=(N, 3))


def test_the_axis_of_classes_is_that_of_the_loss():
    torchs, _ = by_hpctrain(2, CE(), SQUARE_LABELS, lambda: Square(1))
    last, _ = by_hpctrain(2, ht.nn.cross_entropy, SQUARE_LABELS, lambda: Square(2))
    assert difference(torchs, last) <= LIMIT
    assert difference(torchs, plain(CE(), SQUARE_LABELS, lambda: Square(1))) <= LIMIT


@pytest.mark.parametrize(
    "make, targets", [(lambda: Square(1), SQUARE_LABELS), (Places, PLACES)], ids=["both", "axis 1"]
)
def test_a_name_is_refused_where_classes_may_lie_in_axis_1(make, targets):
    with pytest.raises(UsageError, match=r"give torch\.nn\.CrossEntropyLoss"):
        by_hpctrain(2, "cross_entropy", targets, make)
