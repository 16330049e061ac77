"""An optimizer of PyTorch whose tensors are ranges of flat arrays, made once for many updates.

Neighbours of a group with equal counts of updates are one tensor, until one has no gradient:

    param    | 0.weight ....... | 0.bias |gap| head ....... | 1.bias |
    tensors  [ one count ....................................... ]
             [ one count ................... ][ its own ... ][ .... ]   the head had no gradient
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, address_of, to_host
from hpctrain.optim.absent import Ranges
from hpctrain.optim.optimizer import State
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.modules.optimizers.attributes import is_fused

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
    slot: int  #: its index among all slots

    @property
    def is_whole(self) -> bool:
        """Whether it holds all of the parameter."""
        return self.part.stop - self.part.start == self.parameter.numel()


class Span(NamedTuple):
    """A tensor of the optimizer: neighbouring pieces, from the first to the last."""

    pieces: range
    group: int
    elements: slice
    tensor: torch.Tensor
    is_new: bool  #: whether the first step makes its state


class StateNames(NamedTuple):
    """The names in the state of a parameter."""

    planes: list[str]
    numbers: list[str]  #: one of the parameter, which each element of a plane has
    all: list[str]  #: with "step" where PyTorch has it


class BoundOptimizer:
    """The updates of an array of parameters."""

    def __init__(
        self,
        source: torch.optim.Optimizer,
        pieces: Sequence[Piece],
        param: Array,
        state: State,
        names: Sequence[StateNames],
        *,
        is_own: bool,
    ):
        """Before the first update the state is that of `source`, the user's optimizer.

        `names`: of the states of each group. `is_own`: whether `source` itself steps, with its own
        parameters, options and hooks.
        """
        self.state, self.is_own = state, is_own
        self._source, self.pieces, self._param, self._names = source, pieces, param, names
        self._ranges = Ranges([piece.elements for piece in pieces])
        self._places = np.array([piece.place for piece in pieces], np.int64)
        self._with_state: set[int] = set()  # places of parameters that had one at the start
        self._spans: list[Span] = []
        self._expected = np.zeros(0, np.int64)
        self._grads: tuple[int, list[torch.Tensor]] = (0, [])
        if not state["step"][0]:
            for piece in pieces:
                self._take_state(piece)

    def update(self, grad: Array, options: list[dict[str, Any]]) -> None:
        """Update the parameters with `grad`, and the counts."""
        absent_pieces = set(self._ranges.find_absent(grad))
        if not self._has_same_spans(absent_pieces):
            self._make_spans(options, absent_pieces)
        for span, g in zip(self._spans, self._views_of(grad), strict=True):
            span.tensor.grad = None if span.pieces[0] in absent_pieces else g
        if self.is_own:
            self._optimizer.step()
        else:
            self._set_options(options, absent_pieces)
            _step_without_hooks(self._optimizer)
        for span in self._spans:
            span.tensor.grad = None
        self._count_update(absent_pieces)

    def export(self) -> None:
        """Give the user's optimizer the states, if they belong to whole parameters."""
        if self.is_own or not all(piece.is_whole for piece in self.pieces):
            return
        for piece in self.pieces:
            count = int(self.state["step"][piece.place])
            views = self._planes_of(piece.group, piece.elements).items()
            shape = piece.parameter.shape
            state_values = {name: view.clone().view(shape) for name, view in views}
            state_values.update(self._numbers_of(piece))
            if count and "step" in self._names[piece.group].all:
                state_values["step"] = torch.tensor(float(count))
            if count:
                self._source.state[piece.parameter] = state_values

    def _take_state(self, piece: Piece) -> None:
        """Copy the state of a parameter in the user's optimizer, and its count."""
        state, names = self._source.state.get(piece.parameter, {}), self._names[piece.group].all
        state_values = {name: state[name] for name in names if state.get(name) is not None}
        if not state_values:
            return
        if absent_names := ", ".join(sorted(set(names) - state_values.keys())):
            raise UsageError(
                f"optimizer: expected a state with {', '.join(names)}, seen none of "
                f"{absent_names}; load a state that was made with the same options"
            )
        for name, view in self._planes_of(piece.group, piece.elements).items():
            view.copy_(state_values[name].detach().reshape(-1)[piece.part])
        for name in self._names[piece.group].numbers:
            self.state[name][piece.elements] = float(state_values[name])
        self.state["step"][piece.place] = int(state_values.get("step", 1))
        self._with_state.add(piece.place)

    def _has_same_spans(self, absent_pieces: set[int]) -> bool:
        """Return whether the counts are those after the last update, and no span is cut."""
        is_cut = absent_pieces and any(0 < len(absent_pieces.intersection(s.pieces)) < len(s.pieces)
                                for s in self._spans)  # fmt: skip
        return not is_cut and np.array_equal(self.state["step"][self._places], self._expected)

    def _make_spans(self, options: list[dict[str, Any]], absent_pieces: set[int]) -> None:
        """Make the tensors, an optimizer for them, and its states in the planes."""
        counts = self._expected = self.state["step"][self._places]

        def key(i: int) -> tuple[float, ...]:
            piece = self.pieces[i]
            # Without epsilon the gap behind a parameter would become 0 / 0.
            is_single = self.is_own or options[piece.group].get("eps", 1) == 0
            is_new = not counts[i] and piece.place not in self._with_state
            run = i if is_single else piece.slot - i  # equal for neighbours
            numbers = tuple(map(float, self._numbers_of(piece).values()))
            return piece.group, int(counts[i]), is_new, i in absent_pieces, run, *numbers

        parts = [(list(own), first[2]) for first, own in groupby(range(len(self.pieces)), key)]
        self._spans = [self._make_span(range(p[0], p[-1] + 1), bool(new)) for p, new in parts]
        self._optimizer, self._grads = self._source, (0, [])
        if not self.is_own:
            members: dict[int, list[torch.Tensor]] = {}
            for span in self._spans:
                members.setdefault(span.group, []).append(span.tensor)
            groups = [{**options[number], "params": own} for number, own in members.items()]
            self._optimizer = _make_optimizer(self._source, groups)
            self._groups = dict(zip(members, self._optimizer.param_groups, strict=True))
        for span in self._spans:
            if not span.is_new:
                self._use_state(span, options[span.group])

    def _make_span(self, pieces: range, is_new: bool) -> Span:
        first, last = self.pieces[pieces[0]], self.pieces[pieces[-1]]
        elements = slice(first.elements.start, last.elements.stop)
        tensor: torch.Tensor = as_tensor(self._param[elements])
        if self.is_own:
            if not first.is_whole or first.parameter.data_ptr() != address_of(
                self._param[elements]
            ):
                raise UsageError(HOOKS_REFUSED)
            tensor = first.parameter
        return Span(pieces, first.group, elements, tensor, is_new)

    def _use_state(self, span: Span, options: Mapping[str, Any]) -> None:
        """Let the state of a span lie in the planes."""
        state = self._optimizer.state[span.tensor]
        state.update(self._planes_of(span.group, span.elements, span.tensor.shape))
        numbers = self._numbers_of(self.pieces[span.pieces[0]])
        if "step" in self._names[span.group].all:
            numbers["step"] = torch.tensor(float(self._expected[span.pieces[0]]))
        is_moved = is_fused(self._source, options) or isinstance(self._source, torch.optim.ASGD)
        device = span.tensor.device if is_moved else "cpu"  # as PyTorch makes them
        state.update({name: number.to(device) for name, number in numbers.items()})

    def _set_options(self, options: list[dict[str, Any]], absent_pieces: set[int]) -> None:
        """Write the options of this update into the groups."""
        present_spans = [span for span in self._spans if span.pieces[0] not in absent_pieces]
        # A fused step of SGD makes the momenta of all tensors or of none.
        is_mixed = len({span.is_new for span in present_spans}) > 1
        is_split = is_mixed and isinstance(self._optimizer, torch.optim.SGD)
        for number, group in self._groups.items():
            group.update(options[number])
            if is_fused(self._optimizer, group):
                group["fused"] = not is_split

    def _count_update(self, absent_pieces: set[int]) -> None:
        """Count the update of all pieces except `absent_pieces`."""
        is_present = np.ones(len(self.pieces), bool)
        is_present[list(absent_pieces)] = False
        self.state["step"][self._places[is_present]] += 1
        self._expected = self.state["step"][self._places]
        for i, span in enumerate(self._spans):
            state = self._optimizer.state.get(span.tensor, {})
            names = self._names[span.group].all
            if span.pieces[0] not in absent_pieces:
                self._keep_state(span, state)
                if span.is_new:
                    self._spans[i] = span._replace(is_new=False)
            if len(state) > len(names) and not self.is_own:
                raise UsageError(
                    f"schedule: expected options that keep a state of {', '.join(names) or 'none'}"
                    f", seen one with {', '.join(state)}; begin with the option that needs it"
                )

    def _keep_state(self, span: Span, state: dict[str, torch.Tensor]) -> None:
        """Write the state that an update made outside the planes into the planes."""
        if span.is_new:
            planes = self._planes_of(span.group, span.elements, span.tensor.shape)
            state.update({name: view.copy_(state[name]) for name, view in planes.items()})
        for name in self._names[span.group].numbers:
            for i in span.pieces:
                self.state[name][self.pieces[i].elements] = float(state[name])

    def _numbers_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        """Return the numbers in the state of a piece, in the dtypes of the user's optimizer."""
        numbers, given = {}, self._source.state.get(piece.parameter, {})
        for name in self._names[piece.group].numbers:
            value = float(to_host(self.state[name][piece.elements.start]))
            numbers[name] = torch.tensor(value, dtype=given[name].dtype if given else None)
        return numbers

    def _planes_of(
        self, group: int, elements: slice, shape: Sequence[int] = (-1,)
    ) -> dict[str, torch.Tensor]:
        """Return the planes of the state of a range, as tensors of `shape`."""
        names = self._names[group].planes
        return {name: as_tensor(self.state[name][elements]).view(tuple(shape)) for name in names}

    def _views_of(self, grad: Array) -> list[torch.Tensor]:
        """Return the gradients of the spans; hooks may write them, so they get a copy."""
        if self.is_own:
            grad = grad.copy()
        elif self._grads[0] == address_of(grad):
            return self._grads[1]
        views = [as_tensor(grad[s.elements]).view(s.tensor.shape) for s in self._spans]
        self._grads = (0, []) if self.is_own else (address_of(grad), views)
        return views


def find_state_names(
    like: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[StateNames]:
    """Return the names of the state of each group's parameters: those that a first update makes."""
    names_by_group = []
    for group in groups:
        p = torch.ones(1)
        p.grad = torch.ones(1)
        optimizer = _make_optimizer(like, [{"params": [p], **group}])
        _step_without_hooks(optimizer)
        state = {name: x for name, x in sorted(optimizer.state[p].items()) if x is not None}
        plane_names = [name for name, x in state.items() if x.shape == p.shape]
        number_names = [name for name in state if name not in ("step", *plane_names)]
        names_by_group.append(StateNames(plane_names, number_names, list(state)))
    return names_by_group


def _make_optimizer(
    like: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer as `like` with other groups."""
    kind: Any = type(like)
    option_names = inspect.signature(kind).parameters.keys() & like.defaults.keys()
    optimizer: torch.optim.Optimizer = kind(
        groups, **{name: like.defaults[name] for name in option_names}
    )
    return optimizer


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the step of an optimizer, but not the hooks that are called at each step of any."""
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
