"""Which parameters a forward pass reads next: for engines that update them while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


class ParameterNeeds:
    """Calls `on_need` for the parameters of each module before its forward pass.

    Not every module is called: `nn.MultiheadAttention` reads the weight of its `out_proj` itself.
    So the first forward pass needs all parameters, and records the modules that are called. From
    then on a module also needs the parameters of those within it that are not.
    """

    def __init__(self, module: torch.nn.Module, names: Mapping[int, str]):
        """`names`: of the trained parameters, by their `id`."""
        self._root, self._names = module, names
        self._on_need: Callable[[str], None] | None = None
        self._called: set[torch.nn.Module] = set()
        self._needs: dict[torch.nn.Module, list[str]] | None = None
        self._hooks = [m.register_forward_pre_hook(self._before) for m in module.modules()]

    def remove_hooks(self) -> None:
        """Leave the module."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def forward(self, on_need: Callable[[str], None] | None) -> Iterator[None]:
        """Call `on_need` while a forward pass runs within this context."""
        if on_need is None:
            yield
            return
        if self._needs is None:
            for name in self._names.values():
                on_need(name)
        self._on_need = on_need
        try:
            yield
        finally:
            self._on_need = None
        if self._needs is None:
            self._needs = {}
            self._assign(self._root, self._root)

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if self._on_need is None:
            return
        self._called.add(module)
        for name in self._needs.get(module, ()) if self._needs is not None else ():
            self._on_need(name)

    def _assign(self, module: torch.nn.Module, caller: torch.nn.Module) -> None:
        """Assign the parameters of `module` to itself, or to `caller` if it is not called."""
        caller = module if module in self._called else caller
        assert self._needs is not None
        parameters = module._parameters.values()
        names = [self._names[id(p)] for p in parameters if p is not None and id(p) in self._names]
        self._needs.setdefault(caller, []).extend(names)
        for child in module.children():
            self._assign(child, caller)
