"""What the Trainer of modules accepts and refuses, in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import run_on
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.samples import as_samples

pytestmark = pytest.mark.either

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
LABELS = np.arange(32) % 3


def make_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def on_a_rank(function):
    """Return `function(world)` on one rank, a thread of this process."""
    return run_on("threads", 1, function)[0]


def fit(module, data, loss="cross_entropy", optimizer="adamw", steps=3, **options):
    def train(world):
        with ht.torch.Trainer(module, optimizer, loss=loss, world=world, **options) as trainer:
            return trainer.fit(data, steps=steps, batch=8, evaluate=data)

    return on_a_rank(train)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Items(Dataset):
    """Items that draw random numbers; `item` makes one."""

    def __init__(self, item):
        self._item = item

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self._item(index)


class Counted(nn.Module):
    def __init__(self, buffer, persistent=True):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", buffer, persistent)

    def forward(self, x):
        return self.linear(x)


REFUSALS = {
    "no module": (lambda: fit(lambda x: x, (X, LABELS)), "expected a torch.nn.Module"),
    "nothing trained": (lambda: fit(make_module().requires_grad_(False), (X, LABELS)), "seen none"),
    "loss of samples": (
        lambda: fit(make_module(), (X, LABELS), loss=nn.CrossEntropyLoss(reduction="none")),
        "expected reduction mean or sum, seen 'none'",
    ),
    "loss of vectors": (lambda: fit(make_module(), (X, LABELS), lambda z, y: z[:, 0]), "scalar"),
    "label": (lambda: fit(make_module(), (X, LABELS + 1)), "expected labels in 0 .. 2"),
    "outputs that are no tensor": (
        lambda: fit(Pairs(), (X, LABELS)),
        "needs a tensor of outputs, seen tuple",
    ),
    "an optimizer of whole tensors": (
        lambda: fit(make_module(), (X, LABELS), optimizer=lbfgs(make_module())),
        "treats each element by itself",
    ),
    "an optimizer of another module": (
        lambda: fit(make_module(), (X, LABELS), optimizer=sgd(make_module())),
        "expected all parameters of the module",
    ),
    "a schedule of ours": (
        lambda: fit(make_module(), (X, LABELS), schedule=lambda opt: None),
        "expected a torch.optim.Optimizer beside it",
    ),
    "a stream": (lambda: fit(make_module(), Stream()), "expected one with indexes and a length"),
    "items without targets": (
        lambda: fit(make_module(), Items(lambda i: torch.zeros(4))),
        "expected items (x, y)",
    ),
    "tf32": (lambda: fit(make_module(), (X, LABELS), precision="tf32"), "needs a GPU"),
    "another shape": (
        lambda: on_a_rank(
            lambda world: evaluate_other_shape(ht.torch.Trainer(make_module(), "sgd", world=world))
        ),
        "samples of shape",
    ),
}


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x), x


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters())


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def evaluate_other_shape(trainer):
    trainer.evaluate((X, LABELS))
    trainer.evaluate((X[:, :3], LABELS))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    call, message = REFUSALS[name]
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).double().mean()


def test_a_loss_is_a_mean_or_a_sum_with_metrics_of_ones_own():
    losses = {
        "name": "cross_entropy",
        "mean": ht.torch.Loss(nn.functional.cross_entropy, metrics={"accuracy": accuracy}),
        "module": ht.torch.Loss(nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}),
        "sum": ht.torch.Loss(
            nn.CrossEntropyLoss(reduction="sum"),
            metrics={"accuracy": lambda z, y: len(y) * accuracy(z, y)},
        ),
    }
    summaries = {name: fit(make_module(), (X, LABELS), loss) for name, loss in losses.items()}
    for summary in summaries.values():
        for key in ("train_loss", "test_loss", "test_accuracy"):
            assert summary[key] == pytest.approx(summaries["name"][key], rel=1e-5)


class Regression(nn.Module):
    """Takes a dict by keyword, and reports its own loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, features, labels):
        return {"loss": nn.functional.mse_loss(self.linear(features)[:, 0], labels)}


def test_a_module_takes_dicts_and_reports_its_own_loss():
    def make_item(index):
        return {"features": torch.from_numpy(X[index]), "labels": torch.tensor(float(X[index, 0]))}

    data = DataLoader(Items(make_item))
    loss = ht.torch.Loss(lambda outputs, targets: outputs["loss"])
    summary = fit(Regression(), data, loss, optimizer=ht.optim.sgd(rate=0.5), steps=60)
    assert summary["test_loss"] < 0.01


def test_samples_are_a_function_of_epoch_and_index():
    samples = as_samples(Items(lambda index: (torch.randn(3) + index, index)))
    x, y = samples.rows(np.array([4, 7]), epoch=1)
    torch.randn(5)
    again, _ = samples.rows(np.array([7]), epoch=1)
    other, _ = samples.rows(np.array([7]), epoch=2)
    assert (x[1] == again[0]).all() and not (again == other).any()
    assert y.tolist() == [4, 7] and samples.sample_shape == (3,) and len(samples) == 32
    assert samples.rows(np.array([], int))[0].shape == (0, 3)


def test_a_loader_gives_its_data_set_and_collate_function():
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS))
    doubled = DataLoader(data, 4, collate_fn=lambda items: (
        torch.stack([2 * x for x, _ in items]), torch.stack([y for _, y in items])
    ))  # fmt: skip
    x, y = as_samples(doubled).rows(np.array([3]))
    assert (x == 2 * X[3]).all() and y.tolist() == [LABELS[3]]


def test_the_module_keeps_its_names_dtypes_and_memory_after_training():
    module = Counted(torch.tensor(7))
    names = list(module.state_dict())
    weight = module.linear.weight
    before = weight.detach().clone()
    fit(module, (X, LABELS))
    assert list(module.state_dict()) == names and module.linear.weight is weight
    assert module.count.dtype is torch.int64 and module.count.item() == 7
    assert not torch.equal(weight, before) and weight.grad is None
    nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(LABELS)).backward()
    assert weight.grad is not None  # a loop of the user's own goes on


def test_integers_that_float32_cannot_hold_are_kept_and_saved(tmp_path):
    module = Counted(torch.tensor(2**24 + 1))

    def train(world):
        with ht.torch.Trainer(module, "sgd", world=world) as trainer:
            trainer.fit((X, LABELS), steps=3, batch=8, out=tmp_path / "r")

    on_a_rank(train)
    loaded = ht.load(tmp_path / "r", model=ht.torch.Model(Counted(torch.tensor(0))))
    assert module.count.item() == loaded.model.module.count.item() == 2**24 + 1


def test_a_compiled_module_trains_under_the_names_of_its_state_dict(tmp_path):
    module = make_module()
    compiled = torch.compile(module, backend="eager")
    plain = fit(make_module(), (X, LABELS))

    def train(world):
        with ht.torch.Trainer(compiled, "adamw", world=world) as trainer:
            return trainer.fit(
                (X, LABELS), steps=3, batch=8, evaluate=(X, LABELS), out=tmp_path / "r"
            )

    summary = on_a_rank(train)
    assert summary["test_loss"] == pytest.approx(plain["test_loss"], rel=1e-6)
    loaded = ht.load(tmp_path / "r", model=ht.torch.Model(make_module()))
    assert loaded.evaluate((X, LABELS))["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    assert np.allclose(loaded.predict(X), module(torch.from_numpy(X)).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_leaves_weights_in_float32(precision):
    module = make_module()
    summary = fit(module, (X, LABELS), precision=precision, steps=40)
    assert module[0].weight.dtype is torch.float32
    assert summary["test_loss"] == pytest.approx(
        fit(make_module(), (X, LABELS), steps=40)["test_loss"], rel=0.05
    )


def test_frozen_parameters_stay_and_are_saved(tmp_path):
    module = make_module()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()

    def train(world):
        with ht.torch.Trainer(module, "adamw", world=world) as trainer:
            trainer.fit((X, LABELS), steps=3, batch=8, out=tmp_path / "r")

    on_a_rank(train)
    assert torch.equal(module[0].weight, before)
    other = make_module()
    other[0].requires_grad_(False).weight.zero_()
    loaded = ht.load(tmp_path / "r", model=ht.torch.Model(other))
    assert np.allclose(loaded.predict(X), module(torch.from_numpy(X)).detach().numpy(), atol=1e-6)


def test_a_gradient_that_overflows_in_fp16_is_computed_again_with_a_smaller_scale():
    """Its steps are those of another scale, but for the rounding of small numbers."""

    def train(world, exponent):
        module = make_module()
        with ht.torch.Trainer(module, "sgd", world=world, precision="fp16") as trainer:
            trainer.replica.loss_scale.factor = 2.0**exponent
            trainer.fit((X, LABELS), steps=3, batch=8)
            return trainer.replica.loss_scale.factor, module[0].weight.detach().clone()

    (large, first), (small, second) = (on_a_rank(lambda w, e=e: train(w, e)) for e in (24, 10))
    assert large < 2.0**24 and small == 2.0**10
    assert torch.allclose(first, second, atol=1e-4)
