"""What becomes of each class, option and attribute of `torch.optim`.

    used        the Trainer's updates equal PyTorch's with it
    refused     a UsageError names it, where it is not at its default
    announced   a warning at the start says that it is without effect
    internal    PyTorch's own bookkeeping

What a later PyTorch adds is in no column: it is refused unless it has its default, and
tests/guests/test_attributes_optimizers.py fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import optimizer as hooks_of_all

from hpctrain.core.errors import UsageError

#: Classes that treat each element by itself: a state has the shape of parameters, or is a number.
ELEMENTWISE = (
    "SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop",
    "Rprop",
)  # fmt: skip
#: On CPUs one pass over memory instead of several: AdamW takes a ninth of the time.
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CLASSES = {
    **dict.fromkeys(ELEMENTWISE, "used"),
    **dict.fromkeys(("Adafactor", "LBFGS", "Muon", "SparseAdam"), "refused"),  # whole tensors
    "Optimizer": "refused",  # subclasses of the user's own
}
OPTIONS = {
    **dict.fromkeys(("lr", "weight_decay", "eps", "maximize", "foreach", "fused"), "used"),
    **dict.fromkeys(("momentum", "dampening", "nesterov"), "used"),  # SGD
    **dict.fromkeys(("betas", "amsgrad", "decoupled_weight_decay"), "used"),  # Adam and others
    **dict.fromkeys(("lr_decay", "initial_accumulator_value"), "used"),  # Adagrad
    **dict.fromkeys(("lambd", "t0", "momentum_decay"), "used"),  # ASGD and NAdam
    **dict.fromkeys(("rho", "alpha", "centered", "etas", "step_sizes"), "used"),  # others
    "capturable": "refused",
    "differentiable": "refused",
}
REASONS = {
    "capturable": "the Trainer captures no graph of a GPU",
    "differentiable": "no gradient goes through the Trainer's updates",
}
ATTRIBUTES = {
    **dict.fromkeys(("defaults", "param_groups", "state"), "used"),
    **dict.fromkeys(("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"), "used"),
    "_optimizer_state_dict_pre_hooks": "announced",
    "_optimizer_state_dict_post_hooks": "announced",
    "_optimizer_load_state_dict_pre_hooks": "announced",
    "_optimizer_load_state_dict_post_hooks": "announced",
    "step": "refused",  # another function than the class has
    **dict.fromkeys(("grad_scale", "found_inf"), "refused"),  # of a GradScaler
    **dict.fromkeys(("_zero_grad_profile_name", "_opt_called"), "internal"),
    "_warned_capturable_if_run_uncaptured": "internal",
    "_need_device_dtype_check_for_fused": "internal",
    "_step_supports_amp_scaling": "internal",
}


def check_class(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError unless the optimizer is one of `ELEMENTWISE` itself."""
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None) or name not in ELEMENTWISE:
        raise UsageError(
            f"optimizer: expected one of torch.optim that treats each element by itself "
            f"({', '.join(ELEMENTWISE)}), seen {name}; with ht.torch.sync any optimizer works"
        )


def check_options(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an option of a group or an attribute that the Trainer cannot use."""
    signature = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        for name in optimizer.defaults:
            is_used = OPTIONS.get(name) == "used"
            default = signature[name].default if name in signature else None
            if not is_used and not _is_equal(group[name], default):
                reason = REASONS.get(name, "hpctrain does not know this option")
                raise UsageError(
                    f"optimizer: {name}: expected {default}, since {reason}, seen {group[name]}; "
                    "with ht.torch.sync any option works"
                )
    for name, value in vars(optimizer).items():
        is_wrapped = name == "step" and hasattr(value, "_wrapped_by_lr_sched")
        if ATTRIBUTES.get(name) == "refused" and value is not None and not is_wrapped:
            raise UsageError(
                f"optimizer: expected {type(optimizer).__name__} as PyTorch makes it, seen another "
                f"'{name}'; with ht.torch.sync it works"
            )


def is_fused(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    """Return whether an update with `options` is one pass: where the user leaves it open."""
    if options.get("fused") is not None or type(optimizer).__name__ not in FUSED:
        return bool(options.get("fused"))
    values = [x for v in options.values() for x in (v if isinstance(v, tuple) else (v,))]
    return not options["foreach"] and not any(isinstance(x, torch.Tensor) for x in values)


def announced_attributes(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of hooks that the Trainer never calls."""
    names = [name for name, column in ATTRIBUTES.items() if column == "announced"]
    return [name.removeprefix("_optimizer_") for name in names if getattr(optimizer, name, None)]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a user's hook is called at each step of `optimizer`, its own or one of all."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    common = (hooks_of_all._global_optimizer_pre_hooks, hooks_of_all._global_optimizer_post_hooks)
    modules = [str(hook.__module__) for hooks in common for hook in hooks.values()]
    return any(map(bool, own)) or not all(name.startswith("hpctrain.") for name in modules)


def _is_equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
