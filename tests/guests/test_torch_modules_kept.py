"""What the Trainer keeps of a module, what it refuses by name, and what it announces."""

from __future__ import annotations

import io
from copy import deepcopy

import pytest
import safetensors.torch
import torch
from guests.plain import (
    CLASSES,
    FEATURES,
    RATE,
    difference,
    make_samples,
    train_on,
    train_plain,
)
from guests.test_torch_modules import Instances, RunningMean, Tied, make_mlp
from ranks import run_on
from torch import nn

import hpctrain as ht
from hpctrain.core.errors import HpctrainError, UsageError

pytestmark = pytest.mark.either

DATA = make_samples()


def fit(module, ranks=1, **options):
    return train_on(ranks, module, DATA, **options)


@pytest.mark.parametrize(
    "dtype, precision, expected",
    [
        (torch.float64, None, torch.float64),
        (torch.float32, None, torch.float32),
        (torch.float64, "float32", torch.float32),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_a_module_is_returned_in_its_dtype_unless_a_precision_is_given(
    caplog, dtype, precision, expected
):
    options = {} if precision is None else {"precision": precision}
    (trained,) = fit(make_mlp().to(dtype), **options)
    assert {p.dtype for p in trained.parameters()} == {expected}
    assert ("returned in" in caplog.text) == (precision is not None)
    assert (f"seen {dtype} (" in caplog.text) == (precision is not None)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, CLASSES, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def make_mixed():
    module = make_mlp()
    module[0].float()
    return module


#: name: (module, text of the error)
REFUSALS = {
    "complex": (Complex, "seen torch.complex64 'weight'; ht.torch.sync"),
    "bfloat16": (lambda: make_mlp().bfloat16(), "seen torch.bfloat16 ('0.weight'); call"),
    "float16": (lambda: make_mlp().half(), "seen torch.float16"),
    "mixed": (make_mixed, "or all of float64, seen torch.float32 ('0."),
    "lazy": (lambda: nn.LazyLinear(3), "seen 'weight' of a lazy module; call"),
    "meta": (lambda: nn.Linear(3, 3, device="meta"), "seen 'weight' on the device 'meta'"),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(3, 3, sparse=True)),
        "seen sparse=True of '0'; set",
    ),
    "all frozen": (lambda: make_mlp().requires_grad_(False), "with requires_grad, seen none"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    make, text = REFUSALS[name]
    module = make()

    def train(world):
        ht.torch.Trainer(module, "sgd", world=world)

    with pytest.raises(UsageError) as error:
        run_on("threads", 1, train)
    assert text in str(error.value)


def test_a_refusal_on_one_rank_is_one_error_of_all():
    errors = []

    def train(world):
        module = nn.LazyLinear(3) if world.rank else nn.Linear(FEATURES, 3)
        try:
            ht.torch.Trainer(module, "sgd", world=world)
        except UsageError as error:
            errors.append(str(error))

    run_on("threads", 2, train)
    assert len(errors) == 2 and all("rank 1" in text and "lazy" in text for text in errors)


def test_a_sparse_gradient_of_a_functional_embedding_is_refused_by_name():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(FEATURES, CLASSES).double())

        def forward(self, x):
            return nn.functional.embedding(x.long() % FEATURES, self.table, sparse=True).sum(1)

    with pytest.raises(HpctrainError, match=r"seen torch.sparse_coo of 'table'; call"):
        fit(Sparse())


def freeze(module):
    module[0].weight.requires_grad_(False)


def unfreeze(module):
    module[2].bias.requires_grad_(True)


def replace_layer(module):
    module[0] = nn.Linear(FEATURES, 8).double()


def replace_parameter(module):
    module[0].bias = nn.Parameter(torch.zeros(8).double())


def add_parameter(module):
    module.extra = nn.Parameter(torch.zeros(1).double())


CHANGES = {
    freeze: "'0.weight' frozen",
    unfreeze: "'2.bias' unfrozen",
    replace_layer: "'0.weight' replaced, '0.bias' replaced",
    replace_parameter: "'0.bias' replaced",
    add_parameter: "'extra' added",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("changes_on", [(0,), (0, 1)])
def test_what_is_trained_cannot_change_within_a_fit(change, changes_on):
    """One error on all ranks, whichever of them have the callback."""
    module = make_mlp()
    module[2].bias.requires_grad_(False)
    copies, errors = [deepcopy(module) for _ in range(2)], []

    def train(world):
        own, steps = copies[world.rank], []

        def change_at_second(row):
            steps.append(row["step"])
            if len(steps) == 2:
                change(own)

        callbacks = [change_at_second] if world.rank in changes_on else []
        options = ht.FitOptions(interval_steps=1)
        with ht.torch.Trainer(own, "sgd", world=world, callbacks=callbacks) as trainer:
            try:
                trainer.fit(DATA, steps=4, batch=8, options=options)
            except UsageError as error:
                errors.append(str(error))

    run_on("threads", 2, train)
    assert len(errors) == 2 and all(CHANGES[change] in text for text in errors)


def test_a_change_between_two_fits_is_refused_too():
    module = make_mlp()

    def train(world):
        with ht.torch.Trainer(module, "sgd", world=world) as trainer:
            trainer.fit(DATA, steps=1, batch=8)
            freeze(module)
            trainer.fit(DATA, steps=1, batch=8)

    with pytest.raises(UsageError, match=r"'0\.weight' frozen"):
        run_on("threads", 1, train)


def test_a_gradient_of_before_is_not_added():
    """Of a backward pass before the Trainer was made, and of one between two fits."""
    modules = {}

    def train(world, has_gradients):
        own = modules[has_gradients] = make_mlp()

        def fill():
            for p in own.parameters() if has_gradients else ():
                p.grad = torch.ones_like(p)

        fill()
        with ht.torch.Trainer(own, ht.optim.sgd(rate=RATE), world=world) as trainer:
            for _ in range(2):
                trainer.fit(DATA, steps=2, batch=8)
                fill()

    for has_gradients in (False, True):
        run_on("threads", 1, lambda world, has=has_gradients: train(world, has))
    assert difference(modules[False], modules[True]) == 0


def test_modes_of_layers_are_those_of_before_an_evaluation():
    module = make_mlp(nn.BatchNorm1d(8))
    module[1].eval()
    (trained,) = fit(module, evaluate=DATA)
    assert trained.training and trained[0].training and not trained[1].training


def test_a_module_in_evaluation_mode_is_trained_in_training_mode(caplog):
    module = make_mlp(nn.BatchNorm1d(8))
    plain = train_plain(module, DATA)
    (trained,) = fit(module.eval())
    assert trained.training and difference(plain, trained) <= 1e-12
    assert "it was in evaluation mode" in caplog.text


def test_a_trained_module_can_be_copied_and_saved_without_this_package():
    (trained,) = fit(make_mlp(nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.1))))
    file = io.BytesIO()
    torch.save(deepcopy(trained), file)
    assert b"hpctrain" not in file.getvalue()
    assert type(trained[1][0]) is nn.BatchNorm1d
    assert not trained[0].weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("engine", ["allreduce", "ps-sync", "local-sgd", "gossip"])
@pytest.mark.parametrize("make", [Instances, RunningMean])
def test_one_model_is_evaluated_and_saved_whoever_writes_buffers(tmp_path, make, engine):
    """Shares are uneven, and the last one is empty on a rank."""
    copies, values, module = [None] * 3, {}, make()
    engine = ht.engines.PsSync(placement="colocated") if engine == "ps-sync" else engine

    def train(world):
        own = copies[world.rank] = deepcopy(module)
        with ht.torch.Trainer(own, "sgd", engine, world=world) as trainer:
            trainer.fit(make_samples(samples=10), steps=4, batch=8, out=tmp_path / "r")
            values[world.rank] = trainer.evaluate(DATA)["loss"]
            trainer.replica.read_arena()

    run_on("threads", 3, train)
    loaded = ht.load(tmp_path / "r", model=ht.torch.Model(make()))
    assert loaded.evaluate(DATA)["loss"] == pytest.approx(values[0], abs=1e-12)
    assert len(set(values.values())) == 1
    assert all(difference(copies[0], other) == 0 for other in copies[1:])
    assert difference(copies[0], loaded.model.module) == 0


def test_tied_parameters_and_integers_are_exported_as_state_dict_has_them(hpctrain, tmp_path):
    class TiedAndMean(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied, self.mean = Tied(), RunningMean()

        def forward(self, x):
            return self.tied(x) + self.mean(x)

    module = TiedAndMean()

    def train(world):
        with ht.torch.Trainer(module, "sgd", world=world) as trainer:
            trainer.fit(DATA, steps=2, batch=8, out=tmp_path / "r")

    run_on("threads", 1, train)
    file = tmp_path / "w.safetensors"
    completed = hpctrain("checkpoint", "export", tmp_path / "r", "--output", file)
    assert completed.returncode == 0, completed.stderr
    weights = safetensors.torch.load_file(file)
    assert weights["mean.calls"].dtype is torch.int64
    assert weights["mean.calls"].item() == 2**40 + 3
    other = TiedAndMean()
    other.load_state_dict(weights, strict=True)
    assert difference(module, other) == 0

    def start(world, file):
        warm = TiedAndMean()
        ht.torch.Trainer(warm, "sgd", world=world, init=file).close()
        return difference(module, warm)

    assert run_on("threads", 1, lambda world: start(world, file)) == [0]
    del weights["tied.second.weight"]  # files of others have one of the names
    safetensors.torch.save_file(weights, tmp_path / "one.safetensors")
    assert run_on("threads", 1, lambda world: start(world, tmp_path / "one.safetensors")) == [0]
    weights["tied.second.weight"] = weights["tied.first.weight"] + 1
    safetensors.torch.save_file(weights, tmp_path / "other.safetensors")
    with pytest.raises(UsageError, match=r"'tied.second.weight': expected the values of 'tied.f"):
        run_on("threads", 1, lambda world: start(world, tmp_path / "other.safetensors"))


class Unsaved(nn.Module):
    def __init__(self, writes):
        super().__init__()
        self.linear, self.writes = nn.Linear(FEATURES, CLASSES).double(), writes
        self.register_buffer("table", torch.ones(1).double(), persistent=False)
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex128))

    def forward(self, x):
        if self.writes:
            self.table += 1
        return self.linear(x)


@pytest.mark.parametrize("writes", [False, True])
def test_buffers_that_are_not_saved_are_announced_if_they_are_written(caplog, writes):
    (trained,) = fit(Unsaved(writes))
    assert ("buffer 'table'" in caplog.text) == writes
    assert trained.turns.dtype is torch.complex128 and bool((trained.turns == 1).all())


def test_a_buffer_of_another_shape_is_refused():
    class Growing(RunningMean):
        def forward(self, x):
            self.mean = torch.cat([self.mean, self.mean])
            return self.linear(x)

    with pytest.raises(HpctrainError, match=r"expected buffer 'mean' to stay torch.float64 \(6,"):
        fit(Growing())


def test_a_buffer_of_another_dtype_is_announced(caplog):
    module = RunningMean().float()
    module.mean = module.mean.double()
    fit(module)
    assert "buffer 'mean' of torch.float64 is kept in torch.float32" in caplog.text
