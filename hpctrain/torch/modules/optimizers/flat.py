"""An optimizer of PyTorch on flat arrays: on all parameters, a rank's shard, or a server's.

    param    | 0.weight ....... | 0.bias | 1.weight ..|....... | 1.bias |
    shard                                |            |
    tensors                              [ 1.weight ..]

The tensors of a range are made once, with an optimizer of the user's class for them; an update then
writes its options and calls its step. Each slot has a count of its updates, since a slot without a
gradient is left alone, as PyTorch leaves a parameter whose grad is None.

Where the user's optimizer has hooks of its steps, it is itself the optimizer of these tensors: the
module's parameters, with their gradients and states, as the hooks expect them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.core.xp import Array, address_of
from hpctrain.optim.norms import slot_pieces
from hpctrain.optim.optimizer import GatherRows, State, TensorSlot, initial_state
from hpctrain.torch.modules.optimizers.attributes import has_step_hooks
from hpctrain.torch.modules.optimizers.bound import BoundOptimizer, Piece, find_state_names
from hpctrain.torch.modules.optimizers.schedulers import ScheduledOptions


class ParameterEntry(NamedTuple):
    """A parameter of the module, its place in "step", and its group in the optimizer."""

    parameter: torch.nn.Parameter
    place: int
    group: int


class FlatOptimizer:
    """The Init and Update of an optimizer of PyTorch; see `hpctrain.optim.Optimizer`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, ParameterEntry],
        options: ScheduledOptions,
    ):
        """`parameters`: those with a slot, by name; their states begin as the optimizer's are."""
        self._optimizer, self._parameters, self._options = optimizer, parameters, options
        self._state_names = find_state_names(optimizer, options.at(0))
        self._bound: dict[int, BoundOptimizer] = {}  # by the address of the parameters

    def init(self, param: Array) -> State:
        """Return the state of `param`."""
        self._bound.clear()
        names = sorted({name for group in self._state_names for name in group.all} - {"step"})
        state = initial_state(param, names)
        return {**state, "step": np.zeros(1 + len(self._parameters), np.int64)}

    def update(
        self,
        grad: Array,
        state: State,
        param: Array,
        slots: Sequence[TensorSlot],
        gather_rows: GatherRows,
    ) -> None:
        """Update `param` and `state` with `grad`."""
        options = self._options.at(int(state["step"][0]))
        bound, is_own = self._bound.get(address_of(param)), has_step_hooks(self._optimizer)
        if bound is None or bound.state is not state or bound.is_own != is_own:
            pieces, state_names = self._pieces(param, slots), self._state_names
            bound = BoundOptimizer(
                self._optimizer, pieces, param, state, state_names, is_own=is_own
            )
            self._bound[address_of(param)] = bound
        if bound.pieces:  # none in an empty shard
            bound.update(grad, options)
        state["step"][0] += 1

    def export(self) -> None:
        """Give the user's optimizer the states, where this rank holds every parameter's."""
        for bound in self._bound.values():
            if len(bound.pieces) == len(self._parameters):
                bound.export()

    def _pieces(self, param: Array, slots: Sequence[TensorSlot]) -> list[Piece]:
        pieces = []
        for i, elements in slot_pieces(param.size, slots):
            slot = slots[i]
            if slot.name in self._parameters:
                part = slice(elements.start - slot.offset, elements.stop - slot.offset)
                pieces.append(Piece(*self._parameters[slot.name], elements, part, i))
        return pieces
