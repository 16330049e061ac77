"""Gradients of large matrices, which the product of backward writes into the arena itself.

    a hook     dy^T x = new tensor = .grad    copied into the arena
    here       dy^T x = arena = .grad         the hook sees its own memory, and copies nothing

Seen by a TorchDispatchMode during backward alone: the module, its layers and the graph stay as they
are. The node of autograd that computes a product says whose gradient it is. All others are left to
the hook: a second gradient of a tied weight, one that a hook of the user's own may keep, and one
that is itself differentiated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.gradients.arena import Slot
from hpctrain.optim.optimizer import BLOCK_ELEMENTS

#: A smaller gradient is copied in less time than the mode takes to see the operators.
MIN_BYTES = 1 << 20
_MM = torch.ops.aten.mm
#: The nodes of `x @ W.T + b` and of `x @ W`; what others multiply may be no gradient yet.
NODES = ("AddmmBackward0", "MmBackward0")


class Memory(NamedTuple):
    """The memory of a gradient, and its elements with which a shard of the arena may begin."""

    gradient: torch.Tensor
    firsts: tuple[torch.Tensor, torch.Tensor]


class DirectGradients(TorchDispatchMode):
    """Lets products write the gradients of `parameters` where they belong; see above."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]):
        """`parameters`: of a module on the host, by name; small ones and vectors are left out."""
        super().__init__()
        large_matrices = {
            n: p for n, p in parameters.items() if p.dim() == 2 and p.nbytes >= MIN_BYTES
        }
        self._parameters = large_matrices
        self._shapes = {tuple(p.shape) for p in large_matrices.values()}
        self._memory: dict[str, Memory] = {}
        #: What nothing was written to yet, by the `id` of the parameter.
        self._free: dict[int, Memory] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Import no compiler for `__torch_dispatch__`, which takes seconds: none compiles it."""
        return False

    def bind(self, slots: Collection[Slot], gradients: Mapping[str, torch.Tensor]) -> None:
        """Let backward write the gradient of each parameter to its array in `gradients`."""
        for slot in slots:
            if slot.name in self._parameters:
                flat_gradient = gradients[slot.name].view(-1)
                first_elements = (
                    flat_gradient[:1],
                    flat_gradient[-slot.offset % BLOCK_ELEMENTS :: BLOCK_ELEMENTS],
                )
                self._memory[slot.name] = Memory(gradients[slot.name], first_elements)

    def begin(self, written: Collection[str]) -> bool:
        """Begin a backward pass; return whether there is a gradient to write.

        Not those `written` before, to which the gradient of this pass is added.
        """
        self._free = {
            id(p): self._memory[name]
            for name, p in self._parameters.items()
            if name not in written and not _has_hooks(p)
        }
        return bool(self._free)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator; a product that is a gradient writes it into its memory."""
        is_plain = func is _MM.default and not types  # of no subclass of tensors
        if not is_plain or (memory := self._find_memory(*args)) is None:
            return func(*args, **(kwargs or {}))
        gradient = _MM.out(*args, out=memory.gradient.detach())  # of one owner: `.grad` takes it
        for first in memory.firsts:
            first.add_(0.0)  # -0.0 becomes 0.0, unlike ABSENT
        return gradient

    def _find_memory(self, left: torch.Tensor, right: torch.Tensor) -> Memory | None:
        """Return the memory of the gradient that `left @ right` is; None if it is none.

        Of a weight W the gradient is a product with a transposed matrix on the left, without W.
        """
        is_possible = (left.shape[0], right.shape[1]) in self._shapes and left.stride(0) == 1
        if not is_possible or torch.is_grad_enabled():
            return None
        for weight in _multiplied(torch._C._current_autograd_node()):
            is_read = weight.data_ptr() in (left.data_ptr(), right.data_ptr())
            if not is_read and (memory := self._free.pop(id(weight), None)) is not None:
                return memory
        return None


def _multiplied(node: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters that a node of autograd multiplies, transposed or not."""
    for edge, _ in node.next_functions if node is not None and node.name() in NODES else ():
        if edge is not None and edge.name() == "TBackward0":
            edge = edge.next_functions[0][0]
        if (parameter := getattr(edge, "variable", None)) is not None:
            yield parameter


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether hooks other than the replica's get the gradient, and may keep it."""
    after: Any = parameter._post_accumulate_grad_hooks
    return bool(parameter._backward_hooks) or len(after or ()) > 1
