"""Hooks of optimizers' steps are called at each update, as PyTorch calls them, or refused."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from guests.optimizer_cases import (
    ENGINES,
    LIMIT,
    STEPS,
    difference,
    groups_of,
    make_net,
    step_plainly,
    train,
    train_plainly,
)
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import hpctrain as ht
from hpctrain.core.errors import UsageError
from hpctrain.torch.modules.optimizers.attributes import has_step_hooks

pytestmark = pytest.mark.either

OPTIMIZERS = {
    "SGD": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.05),
    "Adagrad": lambda groups: optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1),
}
WHOLE = ["one rank", "2 ranks", "3 ranks", "ordered"]
PARTS = {name: row for name, row in ENGINES.items() if name not in WHOLE}


def clip(optimizer, args, kwargs):
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)


def drop(optimizer, args, kwargs):
    optimizer.param_groups[1]["params"][0].grad = None


def replace(optimizer, args, kwargs):
    p = optimizer.param_groups[0]["params"][0]
    p.grad = p.grad.sign()


def shrink(optimizer, args, kwargs):
    """Change parameters, a rate and a state after the step."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                p.mul_(0.99)
                for name, value in optimizer.state[p].items():
                    if name != "step" and value is not None:
                        value.mul_(0.5)


HOOKS = {
    "clip": ("register_step_pre_hook", clip),
    "drop": ("register_step_pre_hook", drop),
    "replace": ("register_step_pre_hook", replace),
    "shrink": ("register_step_post_hook", shrink),
}


@pytest.mark.parametrize("engine", WHOLE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_called_with_parameters_gradients_and_states(hook, kind, engine):
    register, function = HOOKS[hook]
    before = make_net(lambda step: step == 1)
    loaded = OPTIMIZERS[kind](groups_of(before))
    step_plainly(before, loaded, 3)

    def prepare(net, is_hooked=True):
        optimizer = OPTIMIZERS[kind](groups_of(net))
        optimizer.load_state_dict(copy.deepcopy(loaded.state_dict()))
        if is_hooked:
            getattr(optimizer, register)(function)
        net.calls = 0  # so the head is used once more
        return optimizer, None

    if hook == "drop":  # the bias of the first layer is then left alone
        assert prepare(make_net())[0].param_groups[1]["params"][0].ndim == 1
    expected = train_plainly(prepare, net=before)
    assert difference(train(prepare, *ENGINES[engine], net=before), expected) <= LIMIT
    plain = train_plainly(lambda net: prepare(net, is_hooked=False), net=before)
    assert difference([plain], expected) > 1e-6


def test_each_update_calls_each_hook_once_with_a_schedule():
    calls, rates = [], []

    def prepare(net):
        optimizer = OPTIMIZERS["SGD"](groups_of(net))
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        return optimizer, lambda o: optim.lr_scheduler.StepLR(o, 2)

    expected = train_plainly(prepare)
    plain_rates = rates[:]
    calls.clear(), rates.clear()
    assert difference(train(prepare), expected) <= LIMIT
    assert calls == ["before"] * STEPS and rates == plain_rates


def test_hooks_of_all_optimizers_are_called_too():
    optimizers = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: optimizers.append(optimizer))
    try:
        train(lambda net: (OPTIMIZERS["SGD"](groups_of(net)), None))
    finally:
        handle.remove()
    assert len(optimizers) == STEPS and len(set(map(id, optimizers))) == 1


def test_a_hook_of_hpctrain_is_no_users_hook():
    """As the one that says of processes that they train apart."""
    optimizer = OPTIMIZERS["SGD"]([torch.nn.Parameter(torch.ones(1))])
    for hook, is_users in [(has_step_hooks, False), (lambda *_: None, True)]:
        handle = register_optimizer_step_post_hook(hook)
        try:
            assert has_step_hooks(optimizer) is is_users
        finally:
            handle.remove()


@pytest.mark.parametrize("engine", PARTS)
def test_hooks_are_refused_where_an_update_has_only_a_part(engine):
    def prepare(net):
        optimizer = OPTIMIZERS["SGD"](groups_of(net))
        optimizer.register_step_pre_hook(clip)
        return optimizer, None

    with pytest.raises(UsageError, match="hooks of its steps need"):
        train(prepare, *PARTS[engine])


def test_workers_that_train_apart_call_hooks_on_their_own():
    def prepare(net):
        optimizer = OPTIMIZERS["SGD"](groups_of(net))
        optimizer.register_step_pre_hook(clip)
        return optimizer, None

    engine = ht.engines.LocalSgd(period=2)
    (first, *_) = train(prepare, 2, engine)
    (unclipped, *_) = train(lambda net: (OPTIMIZERS["SGD"](groups_of(net)), None), 2, engine)
    assert not np.allclose(first, unclipped)


def test_hooks_of_states_are_announced_once(caplog):
    def prepare(net):
        optimizer = OPTIMIZERS["SGD"](groups_of(net))
        optimizer.register_load_state_dict_post_hook(lambda *_: None)
        optimizer.register_state_dict_pre_hook(lambda *_: None)
        return optimizer, None

    with caplog.at_level(logging.WARNING):
        train(prepare, 3, steps=1)
    messages = [r.message for r in caplog.records if "are not called" in r.message]
    assert len(messages) == 2 and any("load_state_dict_post_hooks" in m for m in messages)
