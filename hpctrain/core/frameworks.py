"""Models of other frameworks: which of our modules makes them trainable.

That module lies above those that meet such a model, so it is imported by its name, and only when a
user's model is there: then its framework is imported already.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: class that the models are instances of -> our module, with a function `as_model`
ADAPTERS = {("torch.nn.modules.module", "Module"): "hpctrain.torch.modules.model"}


def as_model(value: Any) -> Any | None:
    """Return `value` as a model for the Trainer; None unless it is one of another framework."""
    for cls in type(value).__mro__:
        if adapter := ADAPTERS.get((cls.__module__, cls.__name__)):
            return import_module(adapter).as_model(value)
    return None
