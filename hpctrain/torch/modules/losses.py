"""Losses on the outputs of a module: classes of `ht.nn`, and functions on tensors.

Engines take the gradient of `scale` times the *sum* of the loss over samples, so that shares of any
length add up. A function that returns a mean over its batch of n samples is multiplied by n; of
PyTorch's losses with class weights or ignored targets the sum is taken, and the sum over ranks of
the weights of all targets is its divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import map_arrays
from hpctrain.core.xp import like as in_memory_of
from hpctrain.gradients.guests import GuestLoss
from hpctrain.gradients.replica import Batch
from hpctrain.nn.layer import Key
from hpctrain.nn.losses import Sums, Total, wait_for_sums
from hpctrain.nn.losses.loss import Metric, mean
from hpctrain.torch.modules import loss_modules
from hpctrain.torch.modules.inputs import as_host_array, as_targets, as_tensor
from hpctrain.torch.modules.target_counts import ClassCounts, TargetCounts, UserCount
from hpctrain.torch.tensors import as_array

Reduction = Literal["mean", "sum"]
#: Returns a scalar tensor for the outputs and targets of n samples.
TensorFunction = Callable[[Any, Any], torch.Tensor]
_NO_CONTEXT = nullcontext()
_HOST = torch.empty(0)  #: its memory and dtype are those of targets that are counted


class TorchLoss(GuestLoss):
    """A loss that is a function of outputs and targets, with metrics that are such functions.

    `function(outputs, targets)` returns a scalar tensor: the mean or the sum over the samples of
    the batch, by `reduction`; None: that of its attribute `reduction`, as of
    `torch.nn.CrossEntropyLoss`, else the mean. So do the functions of `metrics`, without a
    gradient. CrossEntropyLoss and NLLLoss, also as functions of torch.nn.functional, are means over
    the weights of all targets that are not ignored. For other means over other things than samples,
    such as the tokens of a masked text, give a function that returns the sum, and `count(targets)`,
    which returns the divisor for the targets of some samples: their divisors are added.
    """

    def __init__(
        self,
        function: TensorFunction,
        reduction: Reduction | None = None,
        metrics: Mapping[str, TensorFunction] = {},
        count: Callable[[Any], Any] | None = None,
    ):
        """Raise UsageError for a function that is none, or another reduction."""
        for name, metric in {"loss": function, **metrics}.items():
            if not callable(metric):
                raise UsageError(f"{name}: expected a function of outputs and targets")
        self._has_own_reduction = reduction is None
        self._name = getattr(function, "__name__", type(function).__name__)
        function = loss_modules.as_module(function)
        reduction = reduction or getattr(function, "reduction", "mean")
        if reduction == "batchmean":  # of KLDivLoss: the sum divided by the samples
            reduction = "mean"
        if reduction not in ("mean", "sum"):
            raise UsageError(f"loss: expected reduction mean or sum, seen {reduction!r}")
        if count is not None and reduction != "sum":
            raise UsageError(
                f"loss: expected reduction='sum' beside count, which divides it, seen {reduction!r}"
            )
        loss_modules.check_function(function, reduction)
        self._functions = {"loss": function, **metrics}
        self._reduction = reduction
        self._counts: TargetCounts | None = UserCount(count) if count is not None else None
        if loss_modules.sums_by_class(function):
            self._counts = ClassCounts(function)
        self._counted: tuple[Any, np.ndarray | None] = self, None  # the targets of a batch
        self.task = loss_modules.task_of(function)  #: None: the targets tell
        self.terms = tuple(self._functions)
        self.metrics: Mapping[str, Metric] = {name: mean(name) for name in self.terms}

    def unwritten(self) -> AbstractContextManager[None]:
        """Return a context in which calls leave the user's function as it was."""
        return loss_modules.unwritten(self._functions["loss"])

    def totals(
        self, outputs: Any, y: Any, targets: Any, n: int
    ) -> dict[str, tuple[torch.Tensor, float]]:
        """Return the sum over `n` samples of the loss and of each metric, with its divisor.

        `targets`: the arrays `y` as tensors.
        """
        factor = n if self._reduction == "mean" else 1
        function = self._functions["loss"]
        loss_modules.check_shapes(function, outputs, targets)
        # Threads may share the loss.
        (counted_targets, counts), self._counted = self._counted, (self, None)
        if self._counts is not None and y is not counted_targets:
            counts = self._counts.counts(targets)
        if self._counts is None or counts is None:
            loss, divisor = loss_modules.call_in_dtype(function, outputs, targets), float(n)
        else:
            loss = loss_modules.call_in_dtype(function, outputs, targets, "sum")
            divisor = self._counts.total(counts)
        if not isinstance(loss, torch.Tensor) or loss.ndim or loss.is_complex():
            is_tensor = isinstance(loss, torch.Tensor)
            actual = f"{loss.dtype} {tuple(loss.shape)}" if is_tensor else type(loss).__name__
            raise UsageError(
                f"loss: expected a real scalar tensor from its function, seen {actual}"
            )
        totals = {"loss": (loss if counts is not None else factor * loss, divisor)}
        with torch.no_grad():
            for name in self.terms[1:]:
                metric = torch.as_tensor(self._functions[name](outputs, targets))
                totals[name] = factor * metric, float(n)
        return totals

    def mean_factor(self, batch: Batch, key: Key) -> float:
        """Return the number of samples per unit of the loss's divisor, in a step; collective.

        Over the ranks of `key.sum_over_ranks`, else over `batch`. 1 for means over samples: then
        nothing is summed, on any rank.
        """
        if self._counts is None:
            return 1.0
        if key.mean_factor is not None:
            return key.mean_factor
        counts = self._counts.counts(as_targets(batch.targets, _HOST))
        self._counted = batch.targets, counts
        if counts is None:
            return 1.0
        n: float = batch.n
        if key.sum_over_ranks is not None:
            count_sums = key.sum_over_ranks(np.concatenate([[n], counts]))
            n, counts = count_sums[0], count_sums[1:]
        divisor = self._counts.total(counts)
        return float(n / divisor) if divisor else 0.0

    def as_logits(self, outputs: np.ndarray, y: Any) -> tuple[np.ndarray, Any]:
        """Return outputs and labels for metrics: the axis of classes last, ignored labels as -1."""
        return loss_modules.as_logits(self._functions["loss"], outputs, y)

    def __call__(self, outputs: Any, targets: Any, scale: float | None = None) -> Any:
        """Raise UsageError: this loss needs tensors."""
        raise UsageError("a loss on tensors needs a model that is a torch.nn.Module")

    def unused(self, batch: int | None) -> str:
        """Describe a reduction of the loss that has another meaning here."""
        if not self._has_own_reduction or self._reduction != "sum":
            return ""
        return (
            f"loss: the sum of {self} with reduction='sum' is divided by the samples of a step, "
            "as any loss is; ht.torch.Loss(loss, 'sum') says that this is meant"
        )

    def __repr__(self) -> str:
        return self._name


def as_loss(loss: Any) -> Any:
    """Return a loss of `ht.nn` by its name or itself, or the TorchLoss of a function."""
    if callable(loss) and not hasattr(loss, "find_fault"):
        return TorchLoss(loss)
    return nn.as_loss(loss)


def metric_arrays(loss: Any, outputs: Any, y: Any) -> tuple[np.ndarray, Any]:
    """Return outputs and targets as metrics get them; see Replica.evaluate."""
    if not isinstance(outputs, torch.Tensor):
        raise UsageError(
            f"metrics: expected a tensor of outputs, seen {type(outputs).__name__}; they are of "
            "modules that return one"
        )
    array = as_host_array(outputs)
    return loss.as_logits(array, y) if isinstance(loss, TorchLoss) else (array, y)


def _widened(x: Any, dtype: torch.dtype) -> Any:
    is_narrow = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.to(dtype) if is_narrow else x


def _fetch(totals: Sequence[torch.Tensor]) -> list[float]:
    """Return scalar tensors as numbers; on a device all are awaited at once."""
    if totals[0].is_cpu:
        return [float(total.item()) for total in totals]
    return cast(list[float], torch.stack([total.double() for total in totals]).tolist())


def check_class_axis(loss: Any, output_shape: tuple[int, ...], y: Any, is_default: bool) -> None:
    """Raise UsageError for labels y (n, ...) that PyTorch would take with classes in axis 1.

    Our cross_entropy takes the last axis. Labels that fit both, as of outputs (n, 5, 5), are
    refused where the loss is a default or a name.
    """
    if loss is not nn.cross_entropy or len(output_shape) < 2 or isinstance(y, dict | tuple):
        return
    if y.shape[1:] == output_shape[1:] and (is_default or y.shape[1:] != output_shape[:-1]):
        raise UsageError(
            f'loss "cross_entropy": its classes are the last axis of the outputs, those of PyTorch '
            f"axis 1; seen outputs (n, {', '.join(map(str, output_shape))}) and labels (n, "
            f"{', '.join(map(str, y.shape[1:]))}); give torch.nn.CrossEntropyLoss() for axis 1, or "
            "ht.nn.cross_entropy for the last one"
        )


def compute_sums(
    loss: Any,
    outputs: Any,
    y: Any,
    n: int,
    *,
    scale: float | None,
    like: torch.Tensor,
    backward: AbstractContextManager[Any] = _NO_CONTEXT,
) -> Sums:
    """Return the sums of `loss` over `n` samples with targets `y`, arrays (n, ...).

    With `scale` the gradient of `scale` times the loss is propagated back from `outputs`, within
    the context `backward`. Targets of functions become tensors in the memory and the dtype of
    `like`; so do outputs of 16 bits, as autocast makes them.
    """
    if isinstance(loss, TorchLoss):
        outputs = map_arrays(partial(_widened, dtype=like.dtype), outputs)
        totals = loss.totals(outputs, y, as_targets(y, like), n)
        if scale is not None:
            loss_sum = totals["loss"][0]
            with backward:
                loss_sum.backward(torch.full_like(loss_sum, scale))
        numbers = _fetch([total.detach() for total, _ in totals.values()])
        return {
            name: Total(number, divisor)
            for (name, (_, divisor)), number in zip(totals.items(), numbers, strict=True)
        }
    outputs = _widened(outputs, like.dtype)
    logits = outputs.detach().contiguous()
    array = as_array(logits).reshape(logits.shape)
    y = map_arrays(lambda targets: in_memory_of(array, targets, targets.dtype), y)
    pending_sums, gradient = loss(array, y, scale)
    if scale is not None:
        with backward:
            outputs.backward(as_tensor(gradient))
    return wait_for_sums(pending_sums)
