"""An optimizer of PyTorch whose tensors are ranges of flat arrays."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, address_of
from hpctrain.optim.absent import find_absent
from hpctrain.optim.optimizer import State
from hpctrain.torch.modules.inputs import as_tensor

#: On CPUs one pass over memory instead of several: AdamW takes a ninth of the time.
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
HOOKS_REFUSED = (
    "optimizer: hooks of its steps need the module's own parameters, all of them; expected the "
    "engine allreduce without shard_optimizer, share_parameters and priority, or local-sgd; or "
    "remove the hooks"
)


class Piece(NamedTuple):
    """A range of flat arrays that holds a parameter or a part of it."""

    parameter: torch.nn.Parameter
    place: int  #: of its count in "step"
    group: int
    elements: slice  #: of the flat arrays
    part: slice  #: of the parameter


class BoundOptimizer:
    """An optimizer, and its tensors: one for each of `pieces`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        state: State,
        names: Sequence[Sequence[str]],
        is_own: bool,
    ):
        """`names`: of the states of each group, with "step" where PyTorch has it.

        `is_own`: whether it is the user's optimizer, with its options and its hooks.
        """
        self._optimizer, self._tensors, self._pieces = optimizer, tensors, pieces
        self._state, self._names, self._is_own = state, names, is_own
        self._counts, self._size = state["step"], sum(p.elements.stop for p in pieces[-1:])
        self._places = np.array([piece.place for piece in pieces], np.int64)
        self._expected = self._counts[self._places]
        self._ranges = [piece.elements for piece in pieces]
        used = dict.fromkeys(piece.group for piece in pieces)
        groups = optimizer.param_groups
        self._groups = {} if is_own else dict(zip(used, groups, strict=True))
        self._with_state: set[int] = set()  # places of parameters that had one at the start
        self._new: set[int] = set()  # pieces whose state the first step will make
        self._grads: tuple[int, list[torch.Tensor]] = (0, [])

    def fits(self, state: State, param: Array, is_own: bool) -> bool:
        """Return whether the tensors are `param`, and the counts those after the last update."""
        return (
            state is self._state
            and is_own == self._is_own
            and param.size >= self._size
            and np.array_equal(self._counts[self._places], self._expected)
        )

    def take_states(self, source: torch.optim.Optimizer) -> None:
        """Copy the states that parameters have in `source`, and their counts."""
        for piece in self._pieces:
            names = self._names[piece.group]
            state = source.state.get(piece.parameter, {})
            values = {name: state[name] for name in names if state.get(name) is not None}
            if values and len(values) < len(names):
                absent = ", ".join(sorted(set(names) - values.keys()))
                raise UsageError(
                    f"optimizer: expected a state with {', '.join(names)}, seen none of {absent}; "
                    "load a state that was made with the same options"
                )
            for name in values.keys() - {"step"}:
                plane = as_tensor(self._state[name][piece.elements])
                plane.copy_(values[name].detach().reshape(-1)[piece.part])
            if values:
                self._counts[piece.place] = int(values.get("step", 1))
                self._with_state.add(piece.place)

    def use_states(self) -> None:
        """Let the states of the optimizer lie in the planes, of pieces that have been updated."""
        self._expected = self._counts[self._places]
        for i, piece in enumerate(self._pieces):
            if not self._counts[piece.place] and piece.place not in self._with_state:
                self._new.add(i)
                continue
            own = self._optimizer.state[self._tensors[i]]
            own.update(self._views(i))
            if "step" in self._names[piece.group]:
                own["step"] = self._make_step(i)

    def update(self, grad: Array, options: list[dict[str, Any]]) -> None:
        """Update the tensors with `grad`, and the counts."""
        absent = set(find_absent(grad, self._ranges))
        for i, (p, g) in enumerate(zip(self._tensors, self._views_of(grad), strict=True)):
            p.grad = None if i in absent else g
        for number, group in self._groups.items():
            group.update(options[number])
            if is_fused(self._optimizer, group):
                group["fused"] = not self._is_partly_new(absent)
        if self._is_own:
            self._optimizer.step()
        else:
            _step_without_hooks(self._optimizer)
        for p in self._tensors:
            p.grad = None
        self._count(absent)

    def export(self, target: torch.optim.Optimizer, parameters: int) -> None:
        """Copy the states to `target`, if the tensors are whole and all of its `parameters`."""
        sizes = [(p.part.stop - p.part.start, p.parameter.numel()) for p in self._pieces]
        if len(sizes) < parameters or any(size < whole for size, whole in sizes):
            return
        for tensor, piece in zip(self._tensors, self._pieces, strict=True):
            state = self._optimizer.state.get(tensor, {})
            target.state[piece.parameter] = {
                name: x.clone() if name == "step" else x.clone().view(piece.parameter.shape)
                for name, x in state.items()
                if x is not None
            }

    def _count(self, absent: set[int]) -> None:
        """Count the update of all pieces but those that are `absent`."""
        is_present = np.ones(len(self._pieces), bool)
        is_present[list(absent)] = False
        self._counts[self._places[is_present]] += 1
        self._expected = self._counts[self._places]
        for i in self._new - absent:
            own = self._optimizer.state[self._tensors[i]]
            for name, view in self._views(i).items():
                own[name] = view.copy_(own[name])
        self._new &= absent
        if not self._is_own:
            self._check_names()

    def _check_names(self) -> None:
        """Raise UsageError if the step has made a state that no checkpoint would have."""
        for p, piece in zip(self._tensors, self._pieces, strict=True):
            state, names = self._optimizer.state.get(p, {}), self._names[piece.group]
            if len(state) > len(names):
                raise UsageError(
                    f"schedule: expected options that keep a state of {', '.join(names)}, seen one "
                    f"with {', '.join(state)}; begin with the option that needs it"
                )

    def _is_partly_new(self, absent: set[int]) -> bool:
        """Return whether SGD makes momenta of only some tensors: its fused step cannot."""
        present = set(range(len(self._pieces))) - absent
        is_sgd = isinstance(self._optimizer, torch.optim.SGD)
        return is_sgd and 0 < len(self._new & present) < len(present)

    def _views(self, i: int) -> dict[str, torch.Tensor]:
        """Return the planes of the state of piece `i`, in the shape of its tensor."""
        elements, shape = self._ranges[i], self._tensors[i].shape
        names = [name for name in self._names[self._pieces[i].group] if name != "step"]
        return {name: as_tensor(self._state[name][elements]).view(shape) for name in names}

    def _views_of(self, grad: Array) -> list[torch.Tensor]:
        """Return the gradients of the tensors; hooks may write them, so they get a copy."""
        if self._is_own:
            grad = grad.copy()
        elif self._grads[0] == address_of(grad):
            return self._grads[1]
        pairs = zip(self._ranges, self._tensors, strict=True)
        views = [as_tensor(grad[elements]).view(p.shape) for elements, p in pairs]
        self._grads = (0, []) if self._is_own else (address_of(grad), views)
        return views

    def _make_step(self, i: int) -> torch.Tensor:
        """Return the count of piece `i` as PyTorch's optimizers have it."""
        p, count = self._tensors[i], float(self._counts[self._places[i]])
        group = self._optimizer.param_groups[0 if self._is_own else self._position_of(i)]
        return torch.tensor(count, device=p.device if is_fused(self._optimizer, group) else "cpu")

    def _position_of(self, i: int) -> int:
        return list(self._groups).index(self._pieces[i].group)


def is_fused(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    """Return whether an update with `options` is one pass: where the user leaves it open."""
    if options.get("fused") is not None or type(optimizer).__name__ not in FUSED:
        return bool(options.get("fused"))
    values = [x for v in options.values() for x in (v if isinstance(v, tuple) else (v,))]
    return not options["foreach"] and not any(isinstance(x, torch.Tensor) for x in values)


def bind_new(
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Piece],
    param: Array,
    options: list[dict[str, Any]],
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Return an optimizer of the class of `optimizer` for ranges of `param`, and its tensors."""
    tensors = [as_tensor(param[piece.elements]) for piece in pieces]
    members: dict[int, list[torch.Tensor]] = {}
    for piece, tensor in zip(pieces, tensors, strict=True):
        members.setdefault(piece.group, []).append(tensor)
    groups = [{**options[number], "params": own} for number, own in members.items()]
    return _make(optimizer, groups), tensors


def bind_own(
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Piece],
    param: Array,
    options: list[dict[str, Any]],
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """Return the user's `optimizer` and its parameters, which lie in `param`."""
    tensors: list[torch.Tensor] = [piece.parameter for piece in pieces]
    for piece, tensor in zip(pieces, tensors, strict=True):
        is_whole = tensor.numel() == piece.part.stop - piece.part.start
        if not is_whole or tensor.data_ptr() != address_of(param[piece.elements]):
            raise UsageError(HOOKS_REFUSED)
    return optimizer, tensors


def _make(like: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer as `like` with other groups."""
    kind: Any = type(like)
    names = inspect.signature(kind).parameters.keys() & like.defaults.keys()
    made: torch.optim.Optimizer = kind(groups, **{name: like.defaults[name] for name in names})
    return made


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the step of an optimizer, but not the hooks that are called at each step of any."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def find_state_names(
    like: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Return the names of the state of each group's parameters: those that a first update makes."""
    names = []
    for group in groups:
        p = torch.ones(1)
        p.grad = torch.ones(1)
        optimizer = _make(like, [{"params": [p], **group}])
        _step_without_hooks(optimizer)
        names.append(sorted(name for name, x in optimizer.state[p].items() if x is not None))
    return names
