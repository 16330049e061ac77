"""Data sets and loaders of PyTorch: the Trainer trains on the samples that a plain loop reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from guests.loader_rows import BATCH, DATA, EPOCHS, LABELS, LOADERS, N, Rotated, X, loader
from guests.torch_training import LIMIT, by_plain_loop, by_trainer, difference, make_module
from ranks import run_on
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.torch.modules import loaders
from hpctrain.torch.modules.samples import TorchSamples, as_samples

pytestmark = pytest.mark.either


def plain_batches(make, epochs=EPOCHS):
    own = make()
    for epoch in range(epochs):
        if hasattr(own.sampler, "set_epoch"):
            own.sampler.set_epoch(epoch)
        yield from own


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_trains_on_its_own_samples_in_its_own_order(name, ranks):
    trained, summary = by_trainer(ranks, LOADERS[name], BATCH, epochs=EPOCHS)
    batches = list(plain_batches(LOADERS[name]))
    assert difference(trained, by_plain_loop(batches)) <= LIMIT
    assert summary["steps"] == len(batches)
    assert summary["samples"] == sum(len(y) for _, y in batches)


def test_loaders_differ():
    ends = {name: by_plain_loop(plain_batches(make)).tobytes() for name, make in LOADERS.items()}
    assert len(set(ends.values())) == len(ends)


@pytest.mark.parametrize("drop_last", [False, True])
def test_replicas_of_several_ranks_train_on_what_they_have_together(drop_last):
    """Of 27 samples 4 replicas have 28, one of them twice, or 24."""
    options = {"seed": 1, "drop_last": drop_last}

    def make(replicas=4, rank=1):
        return loader(sampler=DistributedSampler(DATA, replicas, rank, **options))

    trained, _ = by_trainer(2, make, BATCH, epochs=1)
    parts = [list(DistributedSampler(DATA, 4, rank, **options)) for rank in range(4)]
    together = [i for group in zip(*parts, strict=True) for i in group]
    assert len(together) == (24 if drop_last else 28)
    batches = DataLoader(DATA, BATCH, sampler=together)
    assert difference(trained, by_plain_loop(batches)) <= LIMIT


@pytest.mark.parametrize("engine", ["ps-sync", "local-sgd", "ps-async", "gossip"])
def test_every_engine_reads_the_samples_of_a_sampler_alone(engine):
    """Ranks step apart in some: at the end of an epoch a fast one begins the next."""
    read = []

    class Watched(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            read.append(index)
            return DATA[index]

    def make():
        return DataLoader(Watched(), BATCH, sampler=SubsetRandomSampler(range(6, N)))

    by_trainer(3, make, BATCH, epochs=4, engine=engine)
    assert set(read) == set(range(6, N))


@pytest.mark.parametrize("name", ["subset", "shuffled by a generator", "its own state", "no order"])
def test_a_resumed_run_draws_the_epochs_of_one_run(tmp_path, name):
    make = LOADERS.get(name) or (lambda: loader(sampler=SubsetRandomSampler(range(20))))
    complete, _ = by_trainer(2, make, BATCH, epochs=3, out=tmp_path / "a")
    by_trainer(2, make, BATCH, epochs=1, out=tmp_path / "b")
    resumed, _ = by_trainer(3, make, BATCH, epochs=3, out=tmp_path / "b", resume=True)
    assert difference(resumed, complete) <= LIMIT


def test_an_evaluation_reads_the_samples_of_its_sampler():
    held_out = [20, 22, 25, 21, 20]
    sets = {
        "sampler": (DataLoader(DATA, 2, sampler=held_out), held_out),
        "drop_last": (DataLoader(DATA, 2, sampler=held_out, drop_last=True), held_out[:4]),
        "drop_last of all": (DataLoader(DATA, 20, drop_last=True), list(range(20))),
    }
    modules = [make_module() for _ in range(2)]

    def evaluate(world):
        module = modules[world.rank]
        with ht.torch.Trainer(module, "sgd", precision="float64", world=world) as trainer:
            summaries = [
                trainer.fit(DATA, steps=1, batch=BATCH, evaluate=data) for data, _ in sets.values()
            ]
            losses = [trainer.evaluate(data)["loss"] for data, _ in sets.values()]
            return [summary["test_loss"] for summary in summaries], losses

    after_steps, at_end = run_on("threads", 2, evaluate)[0]
    for (_, indexes), loss in zip(sets.values(), at_end, strict=True):
        expected = torch.nn.functional.cross_entropy(modules[0](X[indexes]), LABELS[indexes])
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert after_steps[-1] == at_end[-1] and after_steps[0] != at_end[0]


def test_negative_rows_count_from_the_end():
    rows = np.array([-1, 2])
    x, y = as_samples(TensorDataset(X, LABELS)).rows(rows)
    assert np.array_equal(x, X[rows].numpy()) and np.array_equal(y, LABELS[rows].numpy())


class Items(Dataset):
    """Counts how its items are read; `noise`: they draw random numbers."""

    def __init__(self, noise):
        self.noise, self.calls = noise, []

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.calls.append(index)
        return X[index] + (torch.rand(4) if self.noise else 0), LABELS[index]


class ManyItems(Items):
    def __getitems__(self, indexes):
        self.calls.append(tuple(indexes))
        noise = torch.rand(len(indexes), 4) if self.noise else torch.zeros(len(indexes), 4)
        return [(X[i] + noise[k], LABELS[i]) for k, i in enumerate(indexes)]


def test_items_are_read_at_once_where_the_data_set_can():
    data = ManyItems(noise=False)
    x, _ = as_samples(data).rows(np.array([4, 2, 9]))
    assert data.calls == [(4, 2, 9)] and np.array_equal(x, X[[4, 2, 9]])


@pytest.mark.parametrize("make", [Items, ManyItems])
def test_random_changes_of_a_sample_depend_on_it_alone(make):
    samples = as_samples(make(noise=True))
    x, _ = samples.rows(np.array([4, 2, 9]), 1)
    again, _ = as_samples(make(noise=True)).rows(np.array([9, 2]), 1)
    other, _ = samples.rows(np.array([9, 2]), 2)
    assert np.array_equal(x[[2, 1]], again) and not (again == other).any()
    assert not np.array_equal(x[0] - X[4].numpy(), x[1] - X[2].numpy())


def test_rows_of_tensors_are_those_of_their_items():
    plain = as_samples(DataLoader(DATA, collate_fn=lambda items: default_collate(items)))
    for data in (DATA, Subset(Subset(DATA, range(25)), [3, 1, 24, 7])):
        indexes = np.array([2, 0, 3])
        base = indexes if data is DATA else np.array([24, 3, 7])
        for rows, expected in zip(as_samples(data).rows(indexes), plain.rows(base), strict=True):
            assert np.array_equal(rows, expected) and rows.dtype == expected.dtype
        assert as_samples(data).rows(np.array([], int))[0].shape == (0, 4)


def test_tensors_of_16_bits_become_floats_with_the_same_values():
    x, _ = as_samples(TensorDataset(X.bfloat16(), LABELS)).rows(np.array([3, 1]))
    assert np.array_equal(x, X[[3, 1]].bfloat16().float())


class NoLength(Sampler):
    def __iter__(self):
        return iter(range(3))


class Short(Rotated):
    def __iter__(self):
        return iter([1, 2])


class Broken(Rotated):
    def __iter__(self):
        raise OSError("no weights")


class Batches(Rotated):
    def __iter__(self):
        return iter([[1, 2], [3]])


class Shard(Rotated):
    num_replicas, rank = 4, 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


REFUSALS = {
    "a stream": (lambda: DataLoader(Stream()), "expected one with indexes and a length"),
    "without a length": (lambda: loader(sampler=NoLength()), "expected one with a length"),
    "too short": (lambda: loader(sampler=Short()), "expected the 24 indexes of an epoch"),
    "out of range": (lambda: loader(sampler=[3, N]), f"expected indexes in 0 .. {N - 1}, seen {N}"),
    "not integers": (lambda: loader(sampler=["a", "b"]), "expected integer indexes"),
    "an error of its own": (lambda: loader(sampler=Broken()), "OSError: no weights"),
    "a part of the ranks": (lambda: loader(sampler=Shard()), "of rank 2 of 4"),
    "batches of its own": (
        lambda: DataLoader(DATA, batch_sampler=Batches()),
        "expected a torch.utils.data.BatchSampler",
    ),
    "batch_size=None": (lambda: DataLoader(DATA, batch_size=None), "expected a batch_size"),
    "fork": (
        lambda: loader(num_workers=1, multiprocessing_context="fork"),
        "expected multiprocessing_context 'forkserver' or 'spawn'",
    ),
    "what cannot be pickled": (
        lambda: loader(num_workers=1, collate_fn=lambda items: items),
        "that can be pickled",
    ),
    "nothing left": (
        lambda: loader(sampler=[1, 2, 3], drop_last=True),
        "drop_last leaves none of 3 samples",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    make, message = REFUSALS[name]
    with pytest.raises(UsageError) as error:
        by_trainer(2, make, BATCH, steps=1)
    assert message in str(error.value)


ANNOUNCEMENTS = {
    "batch_size": ({"batch_size": 4, "shuffle": True}, "batch_size=4 (a step has batch=8"),
    "order": ({}, "shuffle=False (samples come in the Trainer's order"),
    "pin_memory": ({"pin_memory": True}, "pin_memory"),
    "in_order": ({"in_order": False}, "in_order=False"),
    "persistent_workers": ({"num_workers": 2}, "persistent_workers=False"),
}


@pytest.mark.parametrize("name", ANNOUNCEMENTS)
def test_what_is_not_used_is_said_once(name, caplog, monkeypatch):
    monkeypatch.setattr(TorchSamples, "steps_ahead", 0)  # no workers: they start slowly
    options, message = ANNOUNCEMENTS[name]
    by_trainer(2, lambda: loader(**options), BATCH, steps=2)
    assert [r.getMessage() for r in caplog.records if message in r.getMessage()].__len__() == 1


def test_ranks_with_other_samplers_are_refused():
    modules = [make_module() for _ in range(2)]

    def train(world, has_own):
        own = loader(sampler=range(20)) if world.rank else DATA
        train, test = (own, DATA) if has_own == "training" else (DATA, own)
        with ht.torch.Trainer(modules[world.rank], "sgd", world=world) as trainer:
            trainer.fit(train, evaluate=test, steps=1, batch=4)

    with pytest.raises(UsageError, match="the plan of a training must be the same"):
        run_on("threads", 2, lambda world: train(world, "training"))
    with pytest.raises(UsageError, match="the sampler of an evaluation must be the same"):
        run_on("threads", 2, lambda world: train(world, "evaluation"))


def test_options_of_workers_reach_their_loader(monkeypatch):
    seen = {}

    def make_loader(reader, **options):
        seen.update(options)
        return []

    options = {"timeout": 5, "prefetch_factor": 3, "num_workers": 2}
    samples = as_samples(loader(multiprocessing_context="spawn", **options))
    monkeypatch.setattr(loaders, "DataLoader", make_loader)
    assert list(samples.stream([])) == [] and samples.steps_ahead == 6
    assert seen.items() >= {"multiprocessing_context": "spawn", **options}.items()


def test_nothing_is_said_where_all_is_used(caplog):
    by_trainer(2, lambda: loader(shuffle=True), BATCH, steps=2)
    by_trainer(1, LOADERS["subset"], BATCH, steps=2)
    assert "not used" not in caplog.text
