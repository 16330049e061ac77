"""Optimizers and schedules of PyTorch on flat arrays.

An optimizer that treats each element by itself does the same on any range of the arena, so it runs
wherever ours do: on all parameters, on a rank's shard, in a parameter server.

    groups        decay: 0.weight, 1.weight          no decay: 0.bias, 1.bias
    param         | 0.weight .... | 0.bias | 1.weight ..... | 1.bias |      a tensor for each range
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array
from hpctrain.optim import Optimizer
from hpctrain.optim.optimizer import GatherRows, State, TensorSlot, initial_state
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.modules.model import plain_name

#: Optimizers that treat each element by itself, and whose state has the shape of parameters.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RAdam", "RMSprop", "Rprop")
#: Makes a scheduler for an optimizer; it is stepped after each update.
MakeScheduler = Callable[[torch.optim.Optimizer], Any]
IGNORED_OPTIONS = {"params", "param_names", "initial_lr"}
#: On CPUs one pass over memory instead of several: AdamW takes a ninth of the time.
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def as_optimizer(
    optimizer: Any, module: torch.nn.Module, schedule: MakeScheduler | None = None
) -> Any:
    """Return `optimizer` on flat arrays if it is one of PyTorch, else itself.

    `schedule`: makes a scheduler of `torch.optim.lr_scheduler`, stepped after each update. Raises
    UsageError for an optimizer that needs whole tensors, or that holds other parameters than all
    trained ones of `module`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if schedule is not None:
            raise UsageError(
                "schedule: expected a torch.optim.Optimizer beside it; the rate of others is a "
                "number or a function of the step"
            )
        return optimizer
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None) or name not in ELEMENTWISE:
        raise UsageError(
            f"optimizer: expected one of torch.optim that treats each element by itself "
            f"({', '.join(ELEMENTWISE)}), seen {name}; with ht.torch.sync any optimizer works"
        )
    names = {id(p): plain_name(n) for n, p in module.named_parameters() if p.requires_grad}
    group_of: dict[str, int] = {}
    for i, group in enumerate(optimizer.param_groups):
        group_of |= {names[id(p)]: i for p in group["params"] if id(p) in names}
    if group_of.keys() != set(names.values()):
        absent = sorted(set(names.values()) - group_of.keys())
        raise UsageError(
            f"optimizer: expected all parameters of the module with requires_grad, seen none of "
            f"{', '.join(absent[:3])}; set requires_grad = False for what is not trained"
        )
    groups = [
        {key: value for key, value in group.items() if key not in IGNORED_OPTIONS}
        for group in optimizer.param_groups
    ]
    for group in groups:
        if name in FUSED and group["fused"] is None and not group["foreach"]:
            group["fused"] = True
    rates = Rates(type(optimizer), groups, schedule)
    update = partial(_update, type(optimizer), groups, group_of, rates)
    state_names = _state_names(type(optimizer), groups)
    return Optimizer(partial(initial_state, names=state_names), update, rates, needs_norms=False)


class Rates:
    """The rate of each group of an optimizer, as functions of the 0-based step."""

    def __init__(self, kind: Any, groups: Sequence[Mapping[str, Any]], make: MakeScheduler | None):
        self._optimizer = _make(kind, [{"params": [torch.zeros(1)], **group} for group in groups])
        self._scheduler = make(self._optimizer) if make is not None else None
        self._rates = [self._current()]

    def __call__(self, step: int) -> float:
        """Return the rate of the first group, for the metrics."""
        return self.of_groups(step)[0]

    def of_groups(self, step: int) -> list[float]:
        """Return the rate of each group."""
        if self._scheduler is None:
            return self._rates[0]
        while len(self._rates) <= step:
            self._optimizer.step()  # schedulers expect it before theirs
            self._scheduler.step()
            self._rates.append(self._current())
        return self._rates[step]

    def _current(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


def _update(
    kind: Any,
    groups: Sequence[Mapping[str, Any]],
    group_of: Mapping[str, int],
    rates: Rates,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    """Update `param` and `state`: the Update of an Optimizer."""
    step = int(state["step"][0])
    state["step"] += 1
    parts = _parts(param.size, slots, group_of)
    if not parts:  # a rank whose shard is empty
        return
    tensors = [as_tensor(param[elements]) for _, elements in parts]
    members: list[list[torch.Tensor]] = [[] for _ in groups]
    for p, (group, _) in zip(tensors, parts, strict=True):
        members[group].append(p)
    tables = zip(groups, rates.of_groups(step), members, strict=True)
    optimizer = _make(
        kind, [{**group, "lr": rate, "params": own} for group, rate, own in tables if own]
    )
    for p, (_, elements) in zip(tensors, parts, strict=True):
        p.grad = as_tensor(grad[elements])
        if step:  # the first update makes the state itself
            optimizer.state[p] = {
                name: torch.tensor(float(step)) if name == "step" else as_tensor(x[elements])
                for name, x in state.items()
            }
    optimizer.step()
    if not step:
        for p, (_, elements) in zip(tensors, parts, strict=True):
            for name, x in optimizer.state[p].items():
                if name != "step" and x is not None:
                    as_tensor(state[name][elements]).copy_(x)


def _parts(
    size: int, slots: Sequence[TensorSlot], group_of: Mapping[str, int]
) -> list[tuple[int, slice]]:
    """Return (group, range) of parts that cover arrays of `size` elements, in order.

    A gap behind a slot belongs to the part of the slot: it holds zeros, and stays zero.
    """
    starts: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        group = group_of[slot.name]
        if not starts or starts[-1][0] != group:
            starts.append((group, slot.offset))
    parts = []
    for i, (group, start) in enumerate(starts):
        stop = starts[i + 1][1] if i + 1 < len(starts) else size
        start, stop = (min(max(n, 0), size) for n in (start, stop))
        if start < stop:
            parts.append((group, slice(start, stop)))
    return parts


def _make(kind: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer of class `kind`; the rate without a group is never used."""
    return kind(groups, lr=groups[0]["lr"])


def _state_names(kind: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the arrays of the optimizer's state: those that a first update makes."""
    names: set[str] = set()
    for group in groups:
        p = torch.ones(1)
        p.grad = torch.ones(1)
        optimizer = _make(kind, [{"params": [p], **group}])
        optimizer.step()
        names |= {name for name, x in optimizer.state[p].items() if x is not None}
    return sorted(names - {"step"})
