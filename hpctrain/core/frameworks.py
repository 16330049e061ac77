"""Models and data sets of other frameworks: which of our modules makes them usable here.

That module lies above those that meet such an object, so it is imported by its name, and only when
a user's object is there: then its framework is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

#: class of the objects -> our module, with a function `as_model` or `as_samples`
MODELS = {("torch.nn.modules.module", "Module"): "hpctrain.torch.modules.model"}
SAMPLES = {
    ("torch.utils.data.dataset", "Dataset"): "hpctrain.torch.modules.samples",
    ("torch.utils.data.dataloader", "DataLoader"): "hpctrain.torch.modules.samples",
}


def as_model(value: Any) -> Any:
    """Return `value` as a model for the Trainer; None unless it is one of another framework."""
    if hasattr(value, "make_replica"):
        return value
    module = _find_module(MODELS, value)
    return module and module.as_model(value)


def as_samples(value: Any) -> Any:
    """Return `value` as Samples; None unless it is a data set of another framework."""
    module = _find_module(SAMPLES, value)
    return module and module.as_samples(value)


def seed_generators(seed: int) -> None:
    """Seed the generators that initial weights come from, of the frameworks that are imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def _find_module(modules: Mapping[tuple[str, str], str], value: Any) -> Any | None:
    """Return our module for an instance of one of the classes of `modules`; None for others."""
    for cls in type(value).__mro__:
        if name := modules.get((cls.__module__, cls.__name__)):
            return import_module(name)
    return None
