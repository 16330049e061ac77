"""What the Trainer accepts of a module, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from hpctrain.core.errors import UsageError
from hpctrain.gradients.precision import Precision
from hpctrain.torch.modules.names import Names, named_modules, parameter_places

PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "float32", torch.float64: "float64"}
INSTEAD = "ht.torch.sync(module, optimizer) trains it in a loop of your own"
#: The parameters of a module by name, each with whether it is trained.
Parameters = dict[str, tuple[torch.Tensor | None, bool]]


def check_module(module: nn.Module) -> None:
    """Raise UsageError for a module whose parameters cannot be trained in an arena."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"module: expected a torch.nn.Module, seen {type(module).__name__}")
    parameters = Names(module).parameters
    for name, p in parameters.items():
        if nn.parameter.is_lazy(p):
            raise UsageError(
                f"module: expected parameters with a shape, seen '{name}' of a lazy module; call "
                "the module once with a few samples before the Trainer is made"
            )
        if p.is_meta:
            raise UsageError(
                f"module: expected parameters with values, seen '{name}' on the device 'meta'; "
                "call module.to_empty(device='cpu') and load its weights"
            )
        if p.is_complex():
            raise UsageError(
                f"module: expected real parameters, seen {p.dtype} '{name}'; {INSTEAD}"
            )
    if not any(p.requires_grad for p in parameters.values()):
        raise UsageError("module: expected parameters with requires_grad, seen none")
    for prefix, layer in named_modules(module):
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UsageError(
                f"module: expected gradients of whole arrays, seen sparse=True of "
                f"'{prefix.rstrip('.')}'; set its attribute sparse = False, or: {INSTEAD}"
            )


def own_precision(module: nn.Module) -> Precision:
    """Return the dtype that the parameters share; raise UsageError for several, or another."""
    name_by_dtype: dict[torch.dtype, str] = {}
    for name, p in Names(module).parameters.items():
        if p.is_floating_point():
            name_by_dtype.setdefault(p.dtype, name)
    if len(name_by_dtype) == 1 and (precision := PRECISIONS.get(next(iter(name_by_dtype)))):
        return precision
    dtype_texts = " and ".join(f"{dtype} ('{name}')" for dtype, name in name_by_dtype.items())
    raise UsageError(
        f"module: expected parameters of float32, or all of float64, seen {dtype_texts}; call "
        "module.float(), or give the Trainer a precision, such as 'float32', which every parameter "
        "then takes"
    )


def must_be_dense(name: str, gradient: torch.Tensor | None) -> None:
    """Raise UsageError for the sparse gradient of a functional embedding."""
    if gradient is not None and gradient.layout is not torch.strided:
        raise UsageError(
            f"module: expected gradients of whole arrays, seen {gradient.layout} of '{name}'; "
            f"call the embedding with sparse=False, or: {INSTEAD}"
        )


class BoundParameters:
    """The parameters of a module, and which were trained, when a Trainer was made."""

    def __init__(self, module: nn.Module):
        """Note the parameters of `module`, under all names."""
        self._module, self._bound = module, _find_parameters(module)
        self._parameters = [p for p, _ in self._bound.values()]
        self._trained = [is_trained for _, is_trained in self._bound.values()]
        owners = [*module.modules()]
        self._tables: list[dict[str, Any]] = [
            table for m in owners for table in (m._parameters, m._modules)
        ]
        self._lengths, self._ids = [*map(len, self._tables)], self._current_ids()
        self._kept = [[*table.values()] for table in self._tables]  # so that no id is given anew

    def check(self) -> None:
        """Raise UsageError if any was replaced, frozen or unfrozen since."""
        if (  # each step asks
            [getattr(p, "requires_grad", False) for p in self._parameters] == self._trained
            and [*map(len, self._tables)] == self._lengths
            and self._current_ids() == self._ids
        ):
            return
        current_parameters = _find_parameters(self._module)
        names = {**self._bound, **current_parameters}
        changes = [
            text
            for name in names
            if (text := _describe_change(name, self._bound, current_parameters))
        ]
        if changes:
            more_text = f" and {len(changes) - 3} more" * (len(changes) > 3)
            raise UsageError(
                "module: expected the parameters with which the Trainer was made, frozen or not as "
                f"they were, seen {', '.join(changes[:3])}{more_text}; close this Trainer and make "
                "a new one, or use ht.torch.sync, which follows such changes"
            )

    def _current_ids(self) -> list[int]:
        return [*map(id, chain.from_iterable(table.values() for table in self._tables))]


def _find_parameters(module: nn.Module) -> Parameters:
    """Return all parameters as they are now, under all of their names."""
    return {
        place.name: (place.tensor, getattr(place.tensor, "requires_grad", False))
        for place in parameter_places(module)
    }


def _describe_change(name: str, bound: Parameters, current: Parameters) -> str:
    if name not in current or name not in bound:
        return f"'{name}' {'removed' if name in bound else 'added'}"
    (old_tensor, was_trained), (new_tensor, is_trained) = bound[name], current[name]
    if old_tensor is not new_tensor:
        return f"'{name}' replaced"
    return "" if was_trained == is_trained else f"'{name}' {'un' * is_trained}frozen"


def describe_changes(
    own: Mapping[torch.dtype, str],
    buffers: Mapping[str, torch.dtype],
    dtype: torch.dtype,
    was_in_evaluation: bool,
) -> list[str]:
    """Return a text for each property of a module that training in `dtype` changes.

    `own`: the dtypes of its parameters, each with a name; `buffers`: the same for buffers.
    """
    texts = []
    if own.keys() != {dtype}:
        dtype_texts = " and ".join(f"{other} ('{name}')" for other, name in own.items())
        texts.append(
            f"module: parameters are trained and returned in {dtype}, the precision of the run; "
            f"seen {dtype_texts}"
        )
    cast_buffers = {name: other for name, other in buffers.items() if other not in own}
    texts += [
        f"module: buffer '{name}' of {other} is kept in {dtype}"
        for name, other in cast_buffers.items()
    ]
    if was_in_evaluation:
        texts.append(
            "module: it was in evaluation mode, and is trained in training mode; to keep parts in "
            "evaluation mode call module.train() first, then their eval()"
        )
    return texts
