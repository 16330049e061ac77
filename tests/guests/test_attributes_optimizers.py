"""Each class, option, state and attribute of `torch.optim` is in one column of our tables."""

from __future__ import annotations

import inspect

import pytest
import torch
from guests.optimizer_cases import groups_of, make_net, train
from torch import optim
from torch.optim import lr_scheduler as lrs
from torch.optim import swa_utils

from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.optimizers.attributes import (
    ATTRIBUTES,
    CLASSES,
    ELEMENTWISE,
    OPTIONS,
    REASONS,
)
from hpctrain.torch.modules.optimizers.schedulers import SCHEDULERS

pytestmark = pytest.mark.either

COLUMNS = {"used", "refused", "announced", "internal"}
#: arguments of constructors that are no options
ARGUMENTS = {"self", "params"}
#: keys of groups that are no options of a step: PyTorch's own, and those of schedulers
KEYS = {"params", "param_names"}


def classes_of(room, base):
    """Return the public classes of a module that have the base class `base`."""
    return {
        name: kind for name, kind in vars(room).items()
        if inspect.isclass(kind) and issubclass(kind, base) and not name.startswith("_")
    }  # fmt: skip


def unlisted(kind):
    """Return the constructor's arguments, keys of groups and attributes of `kind` in no column."""
    optimizer = kind([torch.ones(2, requires_grad=True)], lr=0.1)
    arguments = set(inspect.signature(kind.__init__).parameters) - ARGUMENTS
    keys = optimizer.param_groups[0].keys() | optimizer.defaults.keys() | arguments
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    return (keys - KEYS - OPTIONS.keys()) | (vars(optimizer).keys() - ATTRIBUTES.keys())


def test_each_class_is_in_a_column():
    assert classes_of(optim, optim.Optimizer).keys() == CLASSES.keys()
    schedulers = classes_of(lrs, lrs.LRScheduler) | classes_of(swa_utils, lrs.LRScheduler)
    assert schedulers.keys() == SCHEDULERS.keys()
    values = [*CLASSES.values(), *SCHEDULERS.values(), *OPTIONS.values(), *ATTRIBUTES.values()]
    assert set(values) == COLUMNS
    assert REASONS.keys() == {name for name, column in OPTIONS.items() if column == "refused"}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_each_option_and_attribute_is_in_a_column(name):
    assert unlisted(getattr(optim, name)) == set()


def test_no_column_has_names_that_pytorch_does_not_have():
    options = {option for name in ELEMENTWISE for option in OPTIONS if option in
               make(name).defaults}  # fmt: skip
    assert options == OPTIONS.keys()


def make(name, net=None, **options):
    net = net or make_net()
    return getattr(optim, name)(groups_of(net, **options), lr=0.1)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_state_of_a_parameter_is_of_its_shape_or_a_number(name):
    """Another kind of state would be lost in shards."""
    for options in ({}, {"amsgrad": True}, {"momentum": 0.9, "centered": True}, {"momentum": 0.9}):
        p = torch.ones(2, 3, requires_grad=True)
        p.grad = torch.ones(2, 3)
        known = inspect.signature(getattr(optim, name)).parameters
        if options.keys() <= known.keys():
            optimizer = getattr(optim, name)([p], lr=0.1, **options)
            optimizer.step()
            state = dict(optimizer.state[p])
            assert float(state.pop("step", 1)) == 1
            assert all(x is None or x.shape in (p.shape, ()) for x in state.values())


class Planted(optim.SGD):
    """SGD of a later PyTorch, with one more option and one more attribute."""

    def __init__(
        self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *,
        maximize=False, foreach=None, differentiable=False, fused=None, damp=0.0,
    ):  # fmt: skip
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize,
            foreach=foreach, differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self.defaults["damp"] = self.planted = damp
        for group in self.param_groups:
            group.setdefault("damp", damp)


def test_an_option_of_a_later_pytorch_fails_this_walk_and_is_refused(monkeypatch):
    assert unlisted(Planted) == {"damp", "planted"}
    monkeypatch.setattr(optim, "SGD", Planted)
    Planted.__name__ = "SGD"
    train(lambda net: (Planted(groups_of(net)), None), steps=1)  # at its default
    with pytest.raises(UsageError, match="since hpctrain does not know this option"):
        train(lambda net: (Planted(groups_of(net, damp=0.5)), None), 2, steps=1)


class Mine(optim.SGD):
    pass


def with_step(optimizer):
    optimizer.step = lambda: None
    return optimizer


def scaled(optimizer):
    optimizer.grad_scale = torch.tensor(2.0)
    return optimizer


REFUSED = {
    **{name: (lambda net, name=name: getattr(optim, name)(net.parameters()), name)
       for name in CLASSES if CLASSES[name] == "refused" and name not in ("Optimizer", "Muon")},
    "Muon": (lambda net: optim.Muon([net.first.weight]), "seen Muon"),
    "Optimizer": (lambda net: Mine(net.parameters(), lr=0.1), "seen Mine"),
    "capturable": (lambda net: make("Adam", net, capturable=True), "capturable: expected False"),
    "differentiable": (
        lambda net: make("SGD", net, differentiable=True), "differentiable: expected False"
    ),
    "step": (lambda net: with_step(make("SGD", net)), "seen another 'step'"),
    "grad_scale": (lambda net: scaled(make("SGD", net)), "seen another 'grad_scale'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_by_name_on_all_ranks(name):
    make_optimizer, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        train(lambda net: (make_optimizer(net), None), 2, steps=1)


def test_ranks_with_other_optimizers_are_refused():
    ranks = iter([0.1, 0.2])
    with pytest.raises(UsageError, match="the optimizer must be the same on all ranks"):
        train(lambda net: (optim.SGD(net.parameters(), lr=next(ranks)), None), 2, steps=1)


def test_ranks_with_other_states_are_refused():
    """As where only rank 0 has loaded a checkpoint."""
    steps = iter([0, 1])

    def prepare(net):
        optimizer = make("Adam", net)
        if next(steps):
            net.scale.grad = torch.ones_like(net.scale)
            optimizer.step()
            net.scale.grad = None
        return optimizer, None

    with pytest.raises(UsageError, match="the optimizer's state"):
        train(prepare, 2, steps=1)
