"""Optimizers of PyTorch under engines take the steps of plain PyTorch, with every option."""

from __future__ import annotations

import copy

import pytest
import torch
from guests.optimizer_cases import (
    ENGINES,
    INITIAL,
    LIMIT,
    STEPS,
    difference,
    groups_of,
    make_net,
    step_plainly,
    train,
    train_plainly,
)
from torch import optim

from hpctrain.torch.modules.optimizers import bound as bound_optimizer
from hpctrain.torch.modules.optimizers.attributes import CLASSES, ELEMENTWISE, OPTIONS
from hpctrain.training.run_options import CheckpointOptions

pytestmark = pytest.mark.either

#: class: the rate, options of all groups, and for each option its value in the second group
OPTION_ROWS = {
    "SGD": (0.3, {"momentum": 0.9}, {
        "lr": 0.1, "momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1, "nesterov": True,
        "maximize": True, "foreach": True, "fused": True,
    }),
    "ASGD": (0.3, {"lambd": 0.1}, {
        "lr": 0.1, "lambd": 0.5, "alpha": 0.2, "t0": 3.0, "weight_decay": 0.2, "maximize": True,
        "foreach": True,
    }),
    "Adam": (0.05, {"weight_decay": 0.01}, {
        "lr": 0.01, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2, "amsgrad": True,
        "maximize": True, "foreach": True, "fused": True, "decoupled_weight_decay": True,
    }),
    "AdamW": (0.05, {}, {
        "lr": 0.01, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.5, "amsgrad": True,
        "maximize": True, "foreach": True, "fused": True, "decoupled_weight_decay": False,
    }),
    "Adamax": (0.05, {}, {
        "lr": 0.01, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2, "maximize": True,
        "foreach": True,
    }),
    "NAdam": (0.05, {"weight_decay": 0.01}, {
        "lr": 0.01, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2, "momentum_decay": 0.5,
        "decoupled_weight_decay": True, "maximize": True, "foreach": True,
    }),
    "RAdam": (0.05, {"weight_decay": 0.01}, {
        "lr": 0.01, "betas": (0.7, 0.9), "eps": 0.1, "weight_decay": 0.2, "maximize": True,
        "foreach": True, "decoupled_weight_decay": True,
    }),
    "Adagrad": (0.1, {}, {
        "lr": 0.05, "lr_decay": 0.2, "weight_decay": 0.2, "eps": 0.1, "maximize": True,
        "initial_accumulator_value": 0.1, "foreach": True, "fused": True,
    }),
    "Adadelta": (1.0, {}, {
        "lr": 0.5, "rho": 0.5, "eps": 1e-3, "weight_decay": 0.2, "maximize": True, "foreach": True,
    }),
    "RMSprop": (0.01, {}, {
        "lr": 0.02, "alpha": 0.5, "eps": 0.1, "weight_decay": 0.2, "momentum": 0.5,
        "centered": True, "maximize": True, "foreach": True,
    }),
    "Rprop": (0.01, {}, {
        "lr": 0.02, "etas": (0.4, 1.5), "step_sizes": (1e-3, 0.015), "maximize": True,
        "foreach": True,
    }),
}  # fmt: skip
ROWS = [(name, option) for name, (_, _, options) in OPTION_ROWS.items() for option in options]
FOR_ALL_GROUPS = {"initial_accumulator_value"}  #: read by the constructor alone
WAYS = ("foreach", "fused")  #: options that change how a step is computed, not its result
FOR_STATES = {"t0"}  #: options that change the state alone
NAMES = list(OPTION_ROWS)


def make(name, net, **options):
    """Return the optimizer `name` of the two groups of `net`; the second group has `options`."""
    rate, common, _ = OPTION_ROWS[name]
    common = common | {key: options.pop(key) for key in FOR_ALL_GROUPS & options.keys()}
    return getattr(optim, name)(groups_of(net, **options), lr=rate, **common)


def preparation(name, **options):
    return lambda net: (make(name, net, **options), None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_each_option_of_a_group_is_used(row, engine):
    name, option = row
    prepare = preparation(name, **{option: OPTION_ROWS[name][2][option]})
    expected = train_plainly(prepare)
    ranks, kind = ENGINES[engine]
    assert difference(train(prepare, ranks, kind), expected) <= LIMIT
    if option not in {*WAYS, *FOR_STATES}:  # the row shows something
        assert difference([train_plainly(preparation(name))], expected) > 1e-6


def test_each_used_option_has_a_row():
    assert list(ELEMENTWISE) == NAMES == [n for n, column in CLASSES.items() if column == "used"]
    for name, (_, _, options) in OPTION_ROWS.items():
        used = {option for option in make(name, INITIAL).defaults if OPTIONS[option] == "used"}
        assert used == options.keys()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [True, False, None])
def test_ways_of_computing_reach_pytorch(monkeypatch, way, value):
    options, step = [], bound_optimizer._step_without_hooks
    monkeypatch.setattr(
        bound_optimizer, "_step_without_hooks",
        lambda optimizer: (options.append(optimizer.param_groups[-1][way]), step(optimizer)),
    )  # fmt: skip
    train(preparation("AdamW", **{way: value}), steps=1)
    assert options[-1] == (True if (way, value) == ("fused", None) else value)  # one pass, if open


TENSORS = {
    "lr": ("AdamW", {"lr": torch.tensor(0.02)}),
    "betas": ("Adam", {"betas": (torch.tensor(0.8), torch.tensor(0.9))}),
    "weight_decay": ("SGD", {"weight_decay": torch.tensor(0.3)}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("option", TENSORS)
def test_options_that_are_tensors_are_used_as_they_are(option, engine):
    """Float32 ones round as in PyTorch."""
    name, options = TENSORS[option]
    prepare = preparation(name, **copy.deepcopy(options))
    assert difference(train(prepare, *ENGINES[engine]), train_plainly(prepare)) <= LIMIT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", ["steps before", "load_state_dict"])
def test_the_first_update_continues_from_the_states_of_the_optimizer(source, name, engine):
    before = make_net(lambda step: step == 2)  # the head has fewer updates than others
    optimizer = make(name, before)
    step_plainly(before, optimizer, 4)

    def prepare(net):
        own = make(name, net)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if source == "steps before":
            step_plainly(net, own, 1)
        net.uses_head, net.calls = (lambda step: step != 3), 0
        return own, None

    expected = train_plainly(prepare, net=before)
    assert difference(train(prepare, *ENGINES[engine], net=before), expected) <= LIMIT
    fresh = train_plainly(lambda net: (make(name, net), None), net=before)
    assert difference([fresh], expected) > 1e-6  # so a dropped state would show


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD"])
@pytest.mark.parametrize("saved", ["one rank", "2 ranks, sharded", "a server"])
def test_a_resumed_training_ends_as_one_without_an_end(tmp_path, saved, name, engine):
    """With states that were loaded, and a head with fewer updates than the other layers."""
    before = make_net()
    optimizer = make(name, before)
    step_plainly(before, optimizer, 3)

    def prepare(net, first=0):
        own = make(name, net)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        net.uses_head, net.calls = (lambda step: (first + step) % 3 == 2), 0
        return own, lambda own: optim.lr_scheduler.StepLR(own, 3)

    expected = train_plainly(prepare, net=before)
    run = {"out": tmp_path / "run", "checkpoints": CheckpointOptions(every_steps=4)}
    half = 4
    train(prepare, *ENGINES[saved], net=before, steps=half, **run)
    resumed = train(
        lambda net: prepare(net, half), *ENGINES[engine], net=before, resume=True, **run
    )
    assert difference(resumed, expected) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_is_given_the_states(name):
    """With t0, on which nothing but the averages of ASGD depends."""
    optimizers = []

    def prepare(net):
        optimizers.append(make(name, net, **({"t0": 3.0} if name == "ASGD" else {})))
        return optimizers[-1], None

    net = make_net(lambda step: step == 2)
    train_plainly(prepare, net=net)
    train(prepare, 2, net=net)
    plain, *own = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for states in own:
        torch.testing.assert_close(states, plain, rtol=LIMIT, atol=LIMIT)


def test_a_float32_state_is_continued_in_float64():
    net = make_net()
    optimizer = make("AdamW", net)
    step_plainly(net, optimizer, 2)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float()

    def prepare(own):
        loaded = make("AdamW", own)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return loaded, None

    assert difference(train(prepare, net=net), train_plainly(prepare, net=net)) <= 1e-7


def test_options_may_change_while_training():
    """As by a callback of the user's own: without a schedule the options of now are used."""

    def prepare(net):
        optimizer = make("SGD", net)

        def uses_head(step):
            optimizer.param_groups[1]["lr"] = 0.3 * 0.5**step
            return False

        net.uses_head = uses_head
        return optimizer, None

    expected = train_plainly(prepare)
    assert difference(train(prepare, 2), expected) <= LIMIT
    assert difference([train_plainly(preparation("SGD"))], expected) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_has_its_states_after_the_trainer(name):
    optimizers = []

    def prepare(net):
        optimizers.append(make(name, net))
        return optimizers[-1], None

    net = make_net(lambda step: step == 2)
    train_plainly(prepare, net=net)
    train(prepare, 2, net=net)
    plain, *trained = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for state in trained:
        assert state.keys() >= plain.keys()
        for key, values in plain.items():
            assert values.keys() == state[key].keys()
            for name, value in values.items():
                torch.testing.assert_close(state[key][name], value, rtol=1e-9, atol=1e-12)


def test_an_optimizer_is_bound_once(monkeypatch):
    calls, make_optimizer = [], bound_optimizer._make_optimizer
    monkeypatch.setattr(
        bound_optimizer,
        "_make_optimizer",
        lambda *args: calls.append(args) or make_optimizer(*args),
    )
    train(preparation("AdamW"), steps=2)
    count = len(calls)
    train(preparation("AdamW"), steps=STEPS)
    assert len(calls) == 2 * count > 0
