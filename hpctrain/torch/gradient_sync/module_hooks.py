"""Hooks of a module that copies of it do not inherit.

A module keeps its forward hooks when it is copied, pickled, averaged or exported. These hold their
owner weakly, and a copy gets a hook that does nothing in their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

#: Returns the inputs of a module as they are; it loads where hpctrain is not installed.
INERT_HOOK: Callable[[Any, Any], Any] = partial(dict.get, {})


def while_lives(owner: Any, method: Callable[..., Any]) -> Callable[..., None]:
    """Return a hook that calls `method` of `owner` while that lives, which it holds weakly.

    Autograd keeps hooks, unseen by Python's collector.
    """
    reference = weakref.ref(owner)

    def call(*args: Any) -> None:
        if (living := reference()) is not None:
            method(living, *args)

    return call


class ForwardHook:
    """Calls a method before each forward pass of a module, while the method's object lives.

    Not where the module is exported. A compiled module calls it before its compiled part, so that
    one of `fullgraph=True` itself must have the hook.
    """

    def __init__(self, method: Callable[[Any], None], owner: Any):
        """`method`: of the class of `owner`."""
        self._call = torch.compiler.disable(while_lives(owner, method))

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_exporting():
            self._call()

    def __deepcopy__(self, memo: Any) -> Callable[[Any, Any], Any]:
        return INERT_HOOK

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (dict.get, {})
