"""Losses of torch.nn under the Trainer: parameters are those of a plain loop, on any ranks.

Each row changes an argument of a loss, so that the parameters of the plain loop change too.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
from guests.torch_training import LIMIT, by_plain_loop, by_trainer, difference, make_module
from ranks import run_on
from torch import nn
from torch.nn import functional as F

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.data import order

pytestmark = pytest.mark.either

N, BATCH, STEPS, CLASSES = 23, 8, 5, 3
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(N, 4))
LABELS = GENERATOR.integers(CLASSES, size=N)
MASKED = np.where(GENERATOR.random(N) < 0.4, -100, LABELS)
MASKED[:2] = 1
PROBABILITIES = GENERATOR.dirichlet(np.ones(CLASSES), size=N)
REALS = GENERATOR.normal(size=(N, CLASSES))
BITS = GENERATOR.integers(2, size=(N, CLASSES)).astype(float)
SIGNS = 2 * BITS - 1
COUNTS = GENERATOR.poisson(2, size=(N, CLASSES)).astype(float)
PLACES = np.where(GENERATOR.random((N, 2)) < 0.3, 2, GENERATOR.integers(2, size=(N, 2)))
TAGS = np.stack([LABELS, -np.ones(N, int), -np.ones(N, int)], axis=1)
W = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)


class Places(nn.Module):
    """Outputs (n, 3, 2): classes in axis 1, as losses of PyTorch take them."""

    def __init__(self):
        super().__init__()
        self.body = make_module(6)

    def forward(self, x):
        return self.body(x).unflatten(1, (3, 2))


class LogSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_module()

    def forward(self, x):
        return self.body(x).log_softmax(1)


class Sigmoid(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_module()

    def forward(self, x):
        return self.body(x).sigmoid()


CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
#: loss, targets, module; the first row of each loss has the defaults
ROWS = {
    "CrossEntropyLoss": (CE(), LABELS, make_module),
    "CrossEntropyLoss, weight": (CE(weight=W), LABELS, make_module),
    "CrossEntropyLoss, ignored labels": (CE(), MASKED, make_module),
    "CrossEntropyLoss, ignore_index": (CE(ignore_index=2), LABELS, make_module),
    "CrossEntropyLoss, weight, ignore_index": (CE(W, ignore_index=1), LABELS, make_module),
    "CrossEntropyLoss, label_smoothing": (CE(label_smoothing=0.2), LABELS, make_module),
    "CrossEntropyLoss, weight, label_smoothing": (
        CE(W, label_smoothing=0.2, ignore_index=0), LABELS, make_module,
    ),
    "CrossEntropyLoss, probabilities": (CE(), PROBABILITIES, make_module),
    "CrossEntropyLoss, weight, probabilities": (CE(weight=W), PROBABILITIES, make_module),
    "CrossEntropyLoss, reduction": (CE(weight=W, reduction="sum"), LABELS, make_module),
    "CrossEntropyLoss, size_average": (CE(size_average=False), LABELS, make_module),
    "CrossEntropyLoss, places": (CE(weight=W, ignore_index=1), PLACES, Places),
    "NLLLoss": (nn.NLLLoss(), LABELS, LogSoftmax),
    "NLLLoss, weight": (nn.NLLLoss(weight=W), LABELS, LogSoftmax),
    "NLLLoss, ignore_index": (nn.NLLLoss(ignore_index=0), LABELS, LogSoftmax),
    "NLLLoss, reduction": (nn.NLLLoss(reduction="sum"), LABELS, LogSoftmax),
    "BCEWithLogitsLoss": (BCE(), BITS, make_module),
    "BCEWithLogitsLoss, weight": (BCE(weight=W), BITS, make_module),
    "BCEWithLogitsLoss, pos_weight": (BCE(pos_weight=W), BITS, make_module),
    "BCEWithLogitsLoss, reduction": (BCE(reduction="sum"), BITS, make_module),
    "BCELoss": (nn.BCELoss(), BITS, Sigmoid),
    "BCELoss, weight": (nn.BCELoss(weight=W), BITS, Sigmoid),
    "BCELoss, reduction": (nn.BCELoss(reduction="sum"), BITS, Sigmoid),
    "MSELoss": (nn.MSELoss(), REALS, make_module),
    "MSELoss, reduction": (nn.MSELoss(reduction="sum"), REALS, make_module),
    "L1Loss": (nn.L1Loss(), REALS, make_module),
    "L1Loss, reduction": (nn.L1Loss(reduction="sum"), REALS, make_module),
    "SmoothL1Loss": (nn.SmoothL1Loss(), REALS, make_module),
    "SmoothL1Loss, beta": (nn.SmoothL1Loss(beta=0.3), REALS, make_module),
    "SmoothL1Loss, reduction": (nn.SmoothL1Loss(reduction="sum"), REALS, make_module),
    "HuberLoss": (nn.HuberLoss(), REALS, make_module),
    "HuberLoss, delta": (nn.HuberLoss(delta=0.3), REALS, make_module),
    "HuberLoss, reduction": (nn.HuberLoss(reduction="sum"), REALS, make_module),
    "KLDivLoss": (nn.KLDivLoss(), PROBABILITIES, LogSoftmax),
    "KLDivLoss, reduction": (nn.KLDivLoss(reduction="batchmean"), PROBABILITIES, LogSoftmax),
    "KLDivLoss, log_target": (
        nn.KLDivLoss(log_target=True), np.log(PROBABILITIES[::-1].copy()), LogSoftmax,
    ),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), COUNTS, make_module),
    "PoissonNLLLoss, log_input": (nn.PoissonNLLLoss(log_input=False), COUNTS, Sigmoid),
    "PoissonNLLLoss, eps": (nn.PoissonNLLLoss(log_input=False, eps=0.1), COUNTS, Sigmoid),
    "PoissonNLLLoss, reduction": (nn.PoissonNLLLoss(reduction="sum"), COUNTS, make_module),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), SIGNS, make_module),
    "HingeEmbeddingLoss, margin": (nn.HingeEmbeddingLoss(margin=0.1), SIGNS, make_module),
    "HingeEmbeddingLoss, reduction": (nn.HingeEmbeddingLoss(reduction="sum"), SIGNS, make_module),
    "SoftMarginLoss": (nn.SoftMarginLoss(), SIGNS, make_module),
    "SoftMarginLoss, reduction": (nn.SoftMarginLoss(reduction="sum"), SIGNS, make_module),
    "MultiMarginLoss": (nn.MultiMarginLoss(), LABELS, make_module),
    "MultiMarginLoss, p": (nn.MultiMarginLoss(p=2), LABELS, make_module),
    "MultiMarginLoss, margin": (nn.MultiMarginLoss(margin=0.1), LABELS, make_module),
    "MultiMarginLoss, weight": (nn.MultiMarginLoss(weight=W), LABELS, make_module),
    "MultiMarginLoss, reduction": (nn.MultiMarginLoss(reduction="sum"), LABELS, make_module),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), TAGS, make_module),
    "MultiLabelMarginLoss, reduction": (
        nn.MultiLabelMarginLoss(reduction="sum"), TAGS, make_module,
    ),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), BITS, make_module),
    "MultiLabelSoftMarginLoss, weight": (
        nn.MultiLabelSoftMarginLoss(weight=W), BITS, make_module,
    ),
    "MultiLabelSoftMarginLoss, reduction": (
        nn.MultiLabelSoftMarginLoss(reduction="sum"), BITS, make_module,
    ),
    "cross_entropy of functional": (F.cross_entropy, MASKED, make_module),
    "cross_entropy of functional, weight": (
        partial(F.cross_entropy, weight=W), LABELS, make_module,
    ),
    "a mean over samples": (
        lambda z, y: F.cross_entropy(z, y, label_smoothing=0.4), LABELS, make_module,
    ),
}  # fmt: skip
#: losses with other arguments, given as functions: their means are over samples or elements
FUNCTIONS = {
    "GaussianNLLLoss": lambda z, y: nn.GaussianNLLLoss()(z, y, z.exp()),
    "CosineEmbeddingLoss": lambda z, y: nn.CosineEmbeddingLoss(margin=0.1)(z, y, y[:, 0].sign()),
    "MarginRankingLoss": lambda z, y: nn.MarginRankingLoss()(z[:, 0], z[:, 1], y[:, 0].sign()),
    "TripletMarginLoss": lambda z, y: nn.TripletMarginLoss()(z, y, -y),
    "CTCLoss": lambda z, y: nn.CTCLoss()(
        z.unflatten(1, (1, 3)).expand(-1, 4, -1).transpose(0, 1).log_softmax(2),
        torch.ones(len(z), 1, dtype=torch.long),
        torch.full((len(z),), 4), torch.full((len(z),), 1),
    ),
}  # fmt: skip
ROWS |= {f"{name} as a function": (f, REALS, make_module) for name, f in FUNCTIONS.items()}


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
            ends[name.split(",")[0]].append(plain(*row).tobytes())
    assert [name for name, states in ends.items() if len(set(states)) < len(states)] == []


WEIGHTED = {"weight": (CE(weight=W), LABELS), "masked": (CE(), MASKED)}


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_evaluation_divides_by_the_weights(name):
    loss, targets = WEIGHTED[name]
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


@pytest.mark.parametrize("engine", ["local-sgd", "ps-async", "gossip", "easgd"])
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
    "too few weights": (CE(weight=W[:2]), LABELS, "weight"),
    "a mean with a count": (None, LABELS, "expected reduction='sum' beside count"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    loss, targets, message = REFUSALS[name]
    with pytest.raises(UsageError) as error:
        if loss is None:
            loss = ht.torch.Loss(F.cross_entropy, count=len)
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
