"""Losses of torch.nn and torch.nn.functional under the Trainer: calls and refusals.

A mean over the elements of the outputs is a mean over samples, since each has as many: the engines
get the number of samples times it. Refused are losses whose value for a share of a batch would not
add up to that for the batch, or whose parameters the Trainer would not train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpctrain.core.errors import UsageError

#: Functions with the module of the same arguments, which is taken in their place.
MODULES: dict[Any, type[nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
    functional.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    functional.multi_margin_loss: nn.MultiMarginLoss,
    functional.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    functional.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
#: Losses that would broadcast targets of another shape over the samples of a share.
ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
    nn.HingeEmbeddingLoss,
)
#: Losses with weights that are broadcast to the outputs, with their names.
BROADCAST_WEIGHTS = {nn.BCELoss: ("weight",), nn.BCEWithLogitsLoss: ("weight", "pos_weight")}


def as_module(function: Any) -> Any:
    """Return the module of torch.nn that a function of torch.nn.functional computes, else itself.

    Also of functools.partial with keywords, such as partial(cross_entropy, weight=w).
    """
    if isinstance(function, partial) and function.func in MODULES and not function.args:
        return MODULES[function.func](**function.keywords)
    try:
        return MODULES[function]() if function in MODULES else function
    except TypeError:  # not hashable
        return function


def check_function(function: Any, reduction: str) -> None:
    """Raise UsageError for another reduction or arguments, or for parameters of its own."""
    name, own_reduction = type(function).__name__, getattr(function, "reduction", reduction)
    if own_reduction != reduction and (own_reduction, reduction) != ("batchmean", "mean"):
        raise UsageError(
            f"loss: expected the reduction of the loss itself, {own_reduction!r} of {name}, seen "
            f"{reduction!r}; leave it out"
        )
    if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
        raise UsageError(
            f"loss: expected one without parameters, seen {name}: the Trainer trains those of the "
            "module; let the module compute this loss, with loss=lambda outputs, targets: outputs"
        )
    try:
        arguments = signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    try:
        arguments.bind(None, None)
    except TypeError:
        raise UsageError(
            f"loss: expected a function of outputs and targets, seen {name} with arguments "
            f"{arguments}; give loss=lambda outputs, targets: criterion(...) with a tuple or dict "
            "of outputs or targets"
        ) from None


def check_shapes(loss: Any, outputs: Any, targets: Any) -> None:
    """Raise UsageError where PyTorch would broadcast over the samples of a share."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return
    if isinstance(loss, ELEMENTWISE) and outputs.shape != targets.shape:
        raise UsageError(
            f"loss: {type(loss).__name__} expects targets of the outputs' shape "
            f"{tuple(outputs.shape)}, seen {tuple(targets.shape)}, which would be compared with "
            "all samples of a share; reshape the targets or the outputs"
        )
    for cls, names in BROADCAST_WEIGHTS.items():
        for name in names if isinstance(loss, cls) else ():
            weight = getattr(loss, name)
            if weight is not None and weight.ndim == outputs.ndim and weight.shape[0] != 1:
                raise UsageError(
                    f"loss: expected a {name} that is broadcast to each sample's outputs "
                    f"{tuple(outputs.shape[1:])}, seen {tuple(weight.shape)} with a weight per "
                    "sample of a batch; make the weights part of the targets"
                )


def call_in_dtype(loss: Any, outputs: Any, targets: Any, reduction: str | None = None) -> Any:
    """Return `loss(outputs, targets)`, its weights in dtype and memory of the outputs.

    With `reduction` instead of its own. A copy is called, and what it writes to itself, as a count
    of its calls, is given to the user's module.
    """
    if not isinstance(loss, nn.Module) or not isinstance(outputs, torch.Tensor):
        return loss(outputs, targets)
    weights = {
        name: x if x is None or not x.is_floating_point() else x.to(outputs)
        for name, x in loss._buffers.items()
    }
    called: Any = copy.copy(loss) if hasattr(type(loss), "__copy__") else _copy(loss)
    vars(called)["_buffers"] = dict(weights)
    if reduction is not None:
        called.reduction = reduction
    before = dict(vars(called))
    result = called(outputs, targets)
    vars(loss).update({k: x for k, x in vars(called).items() if x is not before.get(k, called)})
    written = {k: x for k, x in called._buffers.items() if x is not weights.get(k, called)}
    loss._buffers.update(written)
    return result


@contextmanager
def unwritten(loss: Any) -> Iterator[None]:
    """Restore the attributes and buffers of a loss module after a call that checks it."""
    attributes = dict(vars(loss)) if isinstance(loss, nn.Module) else {}
    if attributes:
        buffers = {k: x if x is None else x.clone() for k, x in loss._buffers.items()}
        vars(loss)["_buffers"] = buffers
    try:
        yield
    finally:
        if attributes:
            vars(loss).clear()
            vars(loss).update(attributes)


def _copy(module: nn.Module) -> Any:
    """Return a shallow copy of a module, in a tenth of the time of `copy.copy`."""
    copied: Any = object.__new__(type(module))
    vars(copied).update(vars(module))
    return copied


def task_of(loss: Any) -> str | None:
    """Return the task that `loss` has whatever the targets, None for another loss."""
    if isinstance(loss, ELEMENTWISE):
        return "numbers"
    return "classes" if _is_of_classes(loss) else None


def as_logits(loss: Any, outputs: np.ndarray, y: Any) -> tuple[np.ndarray, Any]:
    """Return outputs (n, ...) and labels in the form of our losses.

    PyTorch has classes in axis 1, the probabilities of BCELoss are logits of sigmoid, and labels of
    `ignore_index` become -1.
    """
    if isinstance(loss, nn.BCELoss):
        largest = np.finfo(np.float64).max  # of a probability of 1; NaN alone is a fault
        outputs = torch.from_numpy(outputs).double().logit().clamp(-largest, largest).numpy()
    if isinstance(y, np.ndarray) and _is_of_classes(loss) and y.shape == outputs.shape:
        return np.moveaxis(outputs, 1, -1), np.moveaxis(y, 1, -1)  # probabilities of classes
    if not isinstance(y, np.ndarray) or y.dtype.kind not in "iu":
        return outputs, y
    if outputs.ndim > 2 and y.shape == outputs.shape[:1] + outputs.shape[2:]:
        outputs = np.moveaxis(outputs, 1, -1)
    if not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return outputs, y
    return outputs, np.where(y == loss.ignore_index, -1, y.astype(np.int64))


def sums_by_class(loss: Any) -> bool:
    """Return whether a mean of `loss` is one over classes' weights and targets not ignored."""
    return _is_of_classes(loss) and loss.reduction == "mean"


def _is_of_classes(loss: Any) -> bool:
    kinds: tuple[Callable[..., Any], ...] = nn.CrossEntropyLoss.forward, nn.NLLLoss.forward
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and type(loss).forward in kinds
