"""Schedulers of PyTorch under engines: whatever they change is used at each update."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from guests.optimizer_cases import (
    ENGINES,
    LIMIT,
    difference,
    groups_of,
    make_net,
    step_plainly,
    train,
    train_plainly,
)
from torch import optim
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.optimizers.schedulers import RECENT, SCHEDULERS, ScheduledOptions

pytestmark = pytest.mark.either


class Decay(lrs.LRScheduler):
    """A scheduler of the user's own, which changes another option, too."""

    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return [rate * 0.9**self.last_epoch for rate in self.base_lrs]


def make_sequence(optimizer):
    parts = [lrs.ConstantLR(optimizer, 0.1, 2), lrs.ExponentialLR(optimizer, 0.8)]
    return lrs.SequentialLR(optimizer, parts, [3])


def make_chain(optimizer):
    return lrs.ChainedScheduler([lrs.LinearLR(optimizer, 0.2), lrs.ExponentialLR(optimizer, 0.8)])


SCHEDULES = {
    "LRScheduler": Decay,
    "ChainedScheduler": make_chain,
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.1, 4),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, [0.2, 0.1], 3, base_momentum=0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.5**n]),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 0.9, 6),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5], 0.3),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda n: 1 - 0.05 * n),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, [0.2, 0.1], total_steps=12, base_momentum=0.5),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 12, 2.0),
    "SequentialLR": make_sequence,
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "SWALR": lambda o: SWALR(o, 0.01, 4),
}
OPTIMIZERS = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.05),
    "tensor": lambda groups: optim.Adam(groups, lr=torch.tensor(0.05)),
}
MOMENTA = {"SGD": "momentum", "AdamW": "betas"}


def make_optimizer(kind, net):
    return OPTIMIZERS[kind](groups_of(net, weight_decay=0.1))


@pytest.mark.parametrize("is_made", [False, True], ids=["function", "made"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_scheduler_changes_is_used_at_each_update(name, engine, kind, is_made):
    if (name, kind) == ("CyclicLR", "tensor"):
        pytest.skip("CyclicLR takes a rate that is a tensor for a number, and fails")

    def prepare(net):
        optimizer, make = make_optimizer(kind, net), SCHEDULES[name]
        return optimizer, make(optimizer) if is_made else make

    expected = train_plainly(prepare)
    assert difference(train(prepare, *ENGINES[engine]), expected) <= LIMIT
    constant = train_plainly(lambda net: (make_optimizer(kind, net), None))
    assert difference([constant], expected) > 1e-6


def test_each_used_scheduler_has_a_row():
    assert SCHEDULES.keys() == {name for name, column in SCHEDULERS.items() if column == "used"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_made_scheduler_continues_from_its_state(name, engine):
    """With an optimizer and a scheduler that have made steps before."""

    def prepare(net):
        optimizer = make_optimizer("SGD", net)
        scheduler = SCHEDULES[name](optimizer)
        step_plainly(net, optimizer, 2, scheduler)
        return optimizer, scheduler

    expected = train_plainly(prepare, steps=8)
    assert difference(train(prepare, *ENGINES[engine], steps=8), expected) <= LIMIT


def test_cycled_momenta_matter():
    """Else the rows of OneCycleLR and CyclicLR would show the rates alone."""
    for kind, option in MOMENTA.items():
        optimizer = make_optimizer(kind, make_net())
        options = ScheduledOptions(optimizer, SCHEDULES["OneCycleLR"])
        assert options.at(0)[0][option] != options.at(5)[0][option]


@pytest.mark.parametrize("name", SCHEDULES)
def test_earlier_steps_have_the_options_that_they_had(name):
    """As servers ask that are behind workers, and a training that begins again."""
    optimizer = make_optimizer("SGD", make_net())
    options = ScheduledOptions(optimizer, SCHEDULES[name])
    last = RECENT + 20
    if name == "OneCycleLR":
        make = partial(lrs.OneCycleLR, max_lr=0.2, total_steps=last + 1)
        options = ScheduledOptions(optimizer, make)
    first = [copy.deepcopy(options.at(step)) for step in range(last)]
    rates = [options(step) for step in range(last)]
    assert [options.at(step) for step in (last - 1, last - 3, 0, 5, 2, last - 2)] == [
        first[step] for step in (last - 1, last - 3, 0, 5, 2, last - 2)
    ]
    assert rates == [values[0]["lr"] for values in first] == [options(s) for s in range(last)]


def plateau_in_a_chain(optimizer):
    chain = lrs.ChainedScheduler([lrs.ExponentialLR(optimizer, 0.8)])
    chain._schedulers = [*chain._schedulers, lrs.ReduceLROnPlateau(optimizer)]
    return chain


REFUSED = {
    "plateau": (lrs.ReduceLROnPlateau, "seen ReduceLROnPlateau, which needs a metric"),
    "made plateau": (lambda o: lambda: lrs.ReduceLROnPlateau(o), "ReduceLROnPlateau"),
    "plateau in a chain": (plateau_in_a_chain, "seen ReduceLROnPlateau, which needs a metric"),
    "nothing": (lambda o: None, "seen NoneType"),
    "a number": (lambda o: lambda: 0.1, "seen float"),
    "of another optimizer": (
        lambda o: lrs.StepLR(make_optimizer("SGD", make_net()), 3),
        "seen StepLR of another optimizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schedulers_that_do_not_fit_are_refused_by_name(name):
    make, message = REFUSED[name]

    def prepare(net):
        optimizer = make_optimizer("SGD", net)
        maker = make(optimizer) if name in ("made plateau", "a number") else None
        return optimizer, maker() if maker else make

    for ranks in (1, 2):
        with pytest.raises(UsageError, match=message):
            train(prepare, ranks, steps=1)


def test_a_scheduler_that_is_not_given_is_announced(caplog):
    def prepare(net):
        optimizer = make_optimizer("SGD", net)
        lrs.StepLR(optimizer, 3)
        return optimizer, None

    with caplog.at_level(logging.WARNING):
        train(prepare, 2, steps=1)
    assert sum("pass it as schedule" in record.message for record in caplog.records) == 1
