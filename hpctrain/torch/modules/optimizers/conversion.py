"""Optimizers of PyTorch for the Trainer of modules, checked before they are used.

An optimizer that treats each element by itself does the same on any range of the arena, so it runs
wherever ours do: on all parameters, on a rank's shard, in a parameter server.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from hpctrain import engines
from hpctrain.core.errors import UsageError
from hpctrain.optim import Optimizer
from hpctrain.torch.modules.names import Names
from hpctrain.torch.modules.optimizers.attributes import (
    announced_attributes,
    check_class,
    check_options,
    has_step_hooks,
)
from hpctrain.torch.modules.optimizers.bound import HOOKS_REFUSED
from hpctrain.torch.modules.optimizers.flat import FlatOptimizer, ParameterEntry
from hpctrain.torch.modules.optimizers.schedulers import Schedule, ScheduledOptions, has_scheduler
from hpctrain.world import World

log = logging.getLogger(__name__)


def as_optimizer(optimizer: Any, module: torch.nn.Module, schedule: Schedule | None = None) -> Any:
    """Return `optimizer` on flat arrays if it is one of PyTorch, else itself.

    `schedule`: a scheduler of `torch.optim.lr_scheduler` for it, or a function that makes one; it
    is stepped after each update. States that parameters have are used, as are options and hooks:
    see attributes.py. Raises UsageError for what cannot be used, such as an optimizer that
    needs whole tensors, or that lacks a trained parameter of `module`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if schedule is not None:
            raise UsageError(
                "schedule: expected a torch.optim.Optimizer beside it; the rate of others is a "
                "number or a function of the step"
            )
        return optimizer
    check_class(optimizer)
    parameters = _parameter_entries(optimizer, module)
    options = ScheduledOptions(optimizer, schedule)
    check_options(optimizer)
    flat = FlatOptimizer(optimizer, parameters, options)
    # Hooks need every parameter's gradient at once, as norms do.
    needs_all = has_step_hooks(optimizer)
    return Optimizer(flat.init, flat.update, options, needs_all, skips_absent=True)


def export_states(optimizer: Optimizer) -> None:
    """Give the optimizer of PyTorch in `optimizer` its states, where this rank has them all."""
    flat = getattr(optimizer.update, "__self__", None)
    if isinstance(flat, FlatOptimizer):
        flat.export()


def announce(optimizer: torch.optim.Optimizer, schedule: Schedule | None) -> None:
    """Warn of hooks and schedulers without effect; one rank calls it."""
    for name in announced_attributes(optimizer):
        log.warning(
            "optimizer: its %s are not called: the Trainer's checkpoints hold the state", name
        )
    if schedule is None and has_scheduler(optimizer):
        log.warning(
            "optimizer: a scheduler was made for it, but the Trainer was given none, and will not "
            "step it: pass it as schedule"
        )


def check_hooks(optimizer: torch.optim.Optimizer, engine: Any) -> None:
    """Raise UsageError if the engine cannot call the hooks of the optimizer's steps."""
    is_split = any(
        getattr(engine, name, False) for name in ("shard_optimizer", "share_parameters", "priority")
    )
    has_modules = isinstance(engine, engines.AllReduce | engines.LocalSgd | engines.Single)
    if has_step_hooks(optimizer) and (is_split or not has_modules):
        raise UsageError(HOOKS_REFUSED)


def check_agreement(world: World, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless groups and states are equal on all ranks; collective."""
    groups = [
        {**{k: v for k, v in group.items() if k in optimizer.defaults}, "n": len(group["params"])}
        for group in optimizer.param_groups
    ]
    world.must_agree(f"{type(optimizer).__name__} with groups {groups}", "the optimizer")
    digest = hashlib.sha256()
    for group in optimizer.param_groups:
        for p in group["params"]:
            for name, value in sorted(optimizer.state.get(p, {}).items()):
                digest.update(f"{name} {value if not torch.is_tensor(value) else ''}".encode())
                if torch.is_tensor(value):
                    digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    world.must_agree(digest.hexdigest(), "the optimizer's state (its SHA-256)")


def _parameter_entries(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module
) -> dict[str, ParameterEntry]:
    """Return the trained parameters of `module` by name; frozen ones may be held, too."""
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    names = Names(module)
    if absent_names := sorted(name for name, p in names.trained.items() if id(p) not in group_of):
        raise UsageError(
            f"optimizer: expected all parameters of the module with requires_grad, seen none of "
            f"{', '.join(absent_names[:3])}; set requires_grad = False for what is not trained"
        )
    if foreign_count := len(group_of.keys() - {id(p) for p in names.parameters.values()}):
        raise UsageError(
            f"optimizer: expected parameters of the module alone, seen {foreign_count} of others, "
            "which the Trainer would not train; make them part of the module"
        )
    return {
        name: ParameterEntry(p, 1 + i, group_of[id(p)])
        for i, (name, p) in enumerate(names.trained.items())
    }
