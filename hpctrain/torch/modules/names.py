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


def buffer_places(module: nn.Module) -> list[Place]:
    """Return the place of each buffer."""
    return [*_places(module, "_buffers")]


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, each by the first of its names."""
    tied = tied_names(module)
    places = parameter_places(module)
    return {place.name: place.tensor for place in places if place.name not in tied}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of tensors that have several names, by each further name."""
    firsts: dict[int, str] = {}
    places = [*parameter_places(module), *buffer_places(module)]
    pairs = {place.name: firsts.setdefault(id(place.tensor), place.name) for place in places}
    return {name: first for name, first in pairs.items() if name != first}


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
