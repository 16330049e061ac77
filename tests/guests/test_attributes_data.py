"""Tables of the arguments of loaders, samplers and losses: each is used, announced or refused.

An argument of the installed PyTorch in no column fails here, not in a user's run. "used" rows name
the test row that changes it.
"""

from __future__ import annotations

import inspect

import pytest
from guests import test_data_loaders, test_torch_data, test_torch_losses
from guests.loader_rows import LOADERS
from guests.loss_rows import FUNCTIONS, ROWS
from guests.test_torch_data import ANNOUNCEMENTS
from guests.test_torch_data import REFUSALS as DATA_REFUSALS
from guests.test_torch_losses import REFUSALS as LOSS_REFUSALS
from torch import nn
from torch.utils.data import DataLoader, Sampler

pytestmark = pytest.mark.either

#: argument: how it is treated, and the rows of the tests that show it
LOADER = {
    "dataset": ("used", ["subset"]),
    "batch_size": ("announced", ["batch_size"]),
    "shuffle": ("used", ["shuffled by a generator"]),
    "sampler": ("used", ["subset", "weighted", "a list", "its own class"]),
    "batch_sampler": ("used", ["batches of a subset", "batches, drop_last"]),
    "num_workers": ("used", "test_workers_of_the_trainer_read_what_their_rank_would"),
    "collate_fn": ("used", ["collate_fn"]),
    "pin_memory": ("announced", ["pin_memory"]),
    "drop_last": ("used", ["subset, drop_last"]),
    "timeout": ("used", "test_options_of_workers_reach_their_loader"),
    "worker_init_fn": ("used", "test_workers_of_the_trainer_read_what_their_rank_would"),
    "multiprocessing_context": ("used", "test_workers_of_the_trainer_read_what_their_rank_would"),
    "generator": ("used", ["shuffled by a generator", "two generators"]),
    "prefetch_factor": ("used", "test_options_of_workers_reach_their_loader"),
    "persistent_workers": ("announced", ["persistent_workers"]),
    "pin_memory_device": ("announced", ["pin_memory"]),
    "in_order": ("announced", ["in_order"]),
}
SAMPLERS = {
    "SequentialSampler": {"data_source": ["a part in order"]},
    "RandomSampler": {
        "data_source": ["batches, drop_last"],
        "replacement": ["random, repeated"],
        "num_samples": ["random, some"],
        "generator": ["random, some"],
    },
    "SubsetRandomSampler": {"indices": ["subset"], "generator": ["two generators"]},
    "WeightedRandomSampler": {
        "weights": ["weighted"],
        "num_samples": ["weighted"],
        "replacement": ["weighted, each once"],
        "generator": ["weighted"],
    },
    "BatchSampler": {
        "sampler": ["batches of a subset"],
        "batch_size": ["batches of a subset"],  # announced where it differs
        "drop_last": ["batches, drop_last"],
    },
    "DistributedSampler": {
        "dataset": ["replicas"],
        "num_replicas": "test_replicas_of_several_ranks_train_on_what_they_have_together",
        "rank": "test_replicas_of_several_ranks_train_on_what_they_have_together",
        "shuffle": ["replicas, in order"],
        "seed": ["replicas, by seed"],
        "drop_last": "test_replicas_of_several_ranks_train_on_what_they_have_together",
    },
}
#: of every loss: PyTorch turns the first two into `reduction`
LEGACY = {"size_average", "reduce"}
#: arguments of losses by row of the tests; a loss without a row is refused or given as a function
REFUSED_LOSSES = {
    "GaussianNLLLoss": "variances",
    "CosineEmbeddingLoss": "two inputs",
    "MarginRankingLoss": "ranks of two",
    "TripletMarginLoss": "other arguments",
    "TripletMarginWithDistanceLoss": "distances",
    "CTCLoss": "lengths",
    "LinearCrossEntropyLoss": "linear",
    "AdaptiveLogSoftmaxWithLoss": "parameters",
}
#: the same class under an older name, base classes
NOT_WALKED = {"NLLLoss2d", "_Loss", "_WeightedLoss"}


def arguments_of(cls):
    return set(inspect.signature(cls.__init__).parameters) - {"self", "args", "kwargs"}


def subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def losses():
    module = nn.modules.loss
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    own = [c for c in classes if issubclass(c, nn.Module) and c.__module__ == module.__name__]
    own.append(nn.AdaptiveLogSoftmaxWithLoss)
    return {cls.__name__: cls for cls in own if cls.__name__ not in NOT_WALKED}


def samplers():
    return {
        cls.__name__: cls
        for cls in subclasses(Sampler)
        if cls.__module__.startswith("torch.utils.data")
    }


def unlisted_loader_arguments(cls):
    return arguments_of(cls) - LOADER.keys()


def unlisted_sampler_arguments(samplers):
    return {
        (name, argument)
        for name, cls in samplers.items()
        for argument in arguments_of(cls) - SAMPLERS.get(name, {}).keys()
    }


def unlisted_loss_arguments(losses):
    return {
        (name, argument)
        for name, cls in losses.items()
        if name not in REFUSED_LOSSES
        for argument in arguments_of(cls) - LEGACY
        if f"{name}, {argument}" not in ROWS
    }


def test_each_argument_of_a_loader_is_in_a_column():
    assert unlisted_loader_arguments(DataLoader) == set()
    assert LOADER.keys() <= arguments_of(DataLoader)


def test_each_argument_of_a_sampler_has_a_row():
    assert unlisted_sampler_arguments(samplers()) == set()


def test_each_argument_of_a_loss_has_a_row():
    assert unlisted_loss_arguments(losses()) == set()
    assert REFUSED_LOSSES.keys() <= losses().keys()
    assert set(REFUSED_LOSSES.values()) <= LOSS_REFUSALS.keys()
    assert FUNCTIONS.keys() <= REFUSED_LOSSES.keys()


@pytest.mark.parametrize("table", [LOADER, *SAMPLERS.values()])
def test_rows_that_are_named_exist(table):
    for value in table.values():
        column, names = value if isinstance(value, tuple) else ("used", value)
        rows = ANNOUNCEMENTS if column == "announced" else LOADERS | DATA_REFUSALS
        if isinstance(names, list):
            assert set(names) <= rows.keys()
        else:
            modules = test_torch_data, test_torch_losses, test_data_loaders
            assert any(hasattr(module, names) for module in modules), names


class NewLoader(DataLoader):
    def __init__(self, dataset, batch_size=1, echo_factor=2):
        super().__init__(dataset, batch_size)


class NewLoss(nn.MSELoss):
    def __init__(self, temperature=1.0):
        super().__init__()


def test_a_new_argument_is_seen():
    assert unlisted_loader_arguments(NewLoader) == {"echo_factor"}
    assert unlisted_loss_arguments({"MSELoss": NewLoss}) == {("MSELoss", "temperature")}
    assert unlisted_sampler_arguments({"RandomSampler": NewLoader}) == {
        ("RandomSampler", argument) for argument in ("dataset", "batch_size", "echo_factor")
    }
