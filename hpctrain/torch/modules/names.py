"""Names of a module's parameters and buffers: as in `state_dict`, without wrappers.

DistributedDataParallel   module.0.weight       0.weight
torch.compile             _orig_mod.0.weight    0.weight
a user's own attribute    module.weight         module.weight
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Place(NamedTuple):
    """An entry of a module's table of parameters, or of buffers."""

    name: str
    owner: nn.Module
    table: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that the module has now."""
        return self.table.get(self.key)

    @property
    def is_saved(self) -> bool:
        """Whether `state_dict` has the tensor."""
        return self.key not in self.owner._non_persistent_buffers_set


def parameter_places(module: nn.Module) -> list[Place]:
    """Return the place of each parameter; one that is tied has several."""
    return [*_places(module, "_parameters")]


class Names:
    """The parameters and buffers of a module, each by the first of its names."""

    def __init__(self, module: nn.Module):
        parameters, buffers = parameter_places(module), [*_places(module, "_buffers")]
        firsts: dict[int, str] = {}
        places = [*parameters, *buffers]
        pairs = {place.name: firsts.setdefault(id(place.tensor), place.name) for place in places}
        #: the first name of a tensor that has several, by each further name
        self.ties = {name: first for name, first in pairs.items() if name != first}
        self.parameters: dict[str, nn.Parameter] = {
            place.name: place.tensor for place in parameters if place.name not in self.ties
        }
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        #: what checkpoints have beside trained parameters: frozen ones, and buffers
        others = {*self.ties, *self.trained}
        self.kept = {p.name: p for p in places if p.is_saved and p.name not in others}
        self.unsaved = [place for place in buffers if not place.is_saved]


def named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and all within it, with the prefixes of their tensors' names."""
    yield prefix, module
    wrapped = _wrapped_child(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from named_modules(child, prefix if name == wrapped else f"{prefix}{name}.")


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` has a part in the module's forward pass."""
    return any(
        _wrapped_child(m) == "_orig_mod" or m._compiled_call_impl is not None
        for m in module.modules()
    )


def _wrapped_child(module: nn.Module) -> str:
    """Return the attribute that holds what a wrapper wraps; '' for other modules."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # to import its class takes seconds
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else ""


def _places(module: nn.Module, table_name: str) -> Iterator[Place]:
    for prefix, owner in named_modules(module):
        table = getattr(owner, table_name)
        for key, tensor in table.items():
            if tensor is not None:
                yield Place(prefix + key, owner, table, key)
