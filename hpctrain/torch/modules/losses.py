"""Losses on the outputs of a module: those of `ht.nn`, and functions on tensors.

Engines take the gradient of `scale` times the *sum* of the loss over samples, so that shares of any
length add up. A function that returns a mean over its batch of n samples is multiplied by n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays
from hpctrain.core.xp import like as in_memory_of
from hpctrain.nn.losses import Sums, Total, wait_for_sums
from hpctrain.nn.losses.loss import Metric, mean
from hpctrain.torch.modules.inputs import as_targets, as_tensor
from hpctrain.torch.tensors import as_array

Reduction = Literal["mean", "sum"]
#: Returns a scalar tensor for the outputs and targets of n samples.
TensorFunction = Callable[[Any, Any], torch.Tensor]


class TorchLoss:
    """A loss that is a function of outputs and targets, with metrics that are such functions.

    `function(outputs, targets)` returns a scalar tensor: the mean or the sum over the samples of
    the batch, by `reduction`; None: that of its attribute `reduction`, as of
    `torch.nn.CrossEntropyLoss`, else the mean. So do the functions of `metrics`, without a
    gradient. Means over other things than samples, such as the tokens of a masked text, depend on
    the division of the batch: take sums of such.
    """

    def __init__(
        self,
        function: TensorFunction,
        reduction: Reduction | None = None,
        metrics: Mapping[str, TensorFunction] = {},
    ):
        """Raise UsageError for a function that is none, or another reduction."""
        reduction = reduction or getattr(function, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise UsageError(f"loss: expected reduction mean or sum, seen {reduction!r}")
        for name, metric in {"loss": function, **metrics}.items():
            if not callable(metric):
                raise UsageError(f"{name}: expected a function of outputs and targets")
        self._functions = {"loss": function, **metrics}
        self._reduction = reduction
        self.terms = tuple(self._functions)
        self.metrics: Mapping[str, Metric] = {name: mean(name) for name in self.terms}

    def totals(self, outputs: Any, targets: Any, n: int) -> dict[str, torch.Tensor]:
        """Return the sum over `n` samples of the loss, and of each metric."""
        factor = n if self._reduction == "mean" else 1
        loss = self._functions["loss"](outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"loss: expected a scalar tensor from its function, seen {shape}")
        totals = {"loss": factor * loss}
        with torch.no_grad():
            for name in self.terms[1:]:
                totals[name] = factor * torch.as_tensor(self._functions[name](outputs, targets))
        return totals

    def __call__(self, outputs: Any, targets: Any, scale: float | None = None) -> Any:
        """Raise UsageError: this loss needs tensors."""
        raise UsageError("a loss on tensors needs a model that is a torch.nn.Module")

    def find_fault(self, targets: Any, output_shape: tuple[int, ...]) -> str:
        """Return no fault: the function checks its targets."""
        return ""

    def count_outputs(self, targets: Any) -> int:
        """Raise UsageError: only the user knows."""
        raise UsageError("expected the number of classes beside the data: the loss is a function")

    def __repr__(self) -> str:
        function = self._functions["loss"]
        return getattr(function, "__name__", type(function).__name__)


def as_loss(loss: Any) -> Any:
    """Return a loss of `ht.nn` by its name or itself, or the TorchLoss of a function."""
    if isinstance(loss, TorchLoss):
        return loss
    if callable(loss) and not hasattr(loss, "find_fault"):
        return TorchLoss(loss)
    return nn.as_loss(loss)


def compute_sums(
    loss: Any, outputs: Any, y: Any, n: int, scale: float | None, like: torch.Tensor
) -> Sums:
    """Return the sums of `loss` over `n` samples with targets `y`, arrays (n, ...).

    With `scale` the gradient of `scale` times the loss is propagated back from `outputs`. Targets
    of functions become tensors in the memory and the dtype of `like`.
    """
    if isinstance(loss, TorchLoss):
        totals = loss.totals(outputs, as_targets(y, like), n)
        if scale is not None:
            (scale * totals["loss"]).backward()
        numbers = torch.stack([total.detach().double() for total in totals.values()]).tolist()
        return {name: Total(number, n) for name, number in zip(totals, numbers, strict=True)}
    outputs = outputs.to(like.dtype)  # of 16 bits with autocast
    logits = outputs.detach().contiguous()
    array = as_array(logits).reshape(logits.shape)
    y = map_arrays(lambda targets: in_memory_of(array, targets, targets.dtype), y)
    pending_sums, gradient = loss(array, y, scale)
    if scale is not None:
        outputs.backward(as_tensor(gradient))
    return wait_for_sums(pending_sums)
