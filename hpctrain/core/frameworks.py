"""Models and data sets of other frameworks: which of our modules makes them usable here.

That module lies above those that meet such an object, so it is imported by its name, and only when
a user's object is there: then its framework is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_HUGGING_FACE = "hpctrain.data.formats.hugging_face"

#: class of the objects -> our module, with a function `as_model` or `as_samples`
MODELS = {("torch.nn.modules.module", "Module"): "hpctrain.torch.modules.model"}
SAMPLES = {
    ("torch.utils.data.dataset", "Dataset"): "hpctrain.torch.modules.samples",
    ("torch.utils.data.dataloader", "DataLoader"): "hpctrain.torch.modules.samples",
    ("datasets.arrow_dataset", "Dataset"): _HUGGING_FACE,
    ("datasets.dataset_dict", "DatasetDict"): _HUGGING_FACE,
    ("datasets.dataset_dict", "IterableDatasetDict"): _HUGGING_FACE,
    ("datasets.iterable_dataset", "IterableDataset"): _HUGGING_FACE,
}


def as_model(value: Any) -> Any:
    """Return `value` as a model for the Trainer; None unless another framework made it."""
    if hasattr(value, "make_replica"):
        return value
    module = _find_module(MODELS, value)
    return module and module.as_model(value)


def as_samples(value: Any, finite: bool = True) -> Any:
    """Return `value` as Samples; None unless another framework made this data set.

    `finite`: values that are not finite are an error when they are read, where Samples tell.
    """
    module = _find_module(SAMPLES, value)
    return module and module.as_samples(value, finite)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators that initial weights come from, also of a framework imported meanwhile.

    So weights do not depend on where a user's function imports its framework.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
        yield
        return
    finder = _SeedingFinder(seed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def limit_threads(threads: int) -> None:
    """Limit the threads of imported frameworks; those imported later read OMP_NUM_THREADS."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.set_num_threads(min(torch.get_num_threads(), threads))


class _SeedingFinder:
    """Finds PyTorch as Python does, and lets its import end with a seed."""

    def __init__(self, seed: int):
        self._seed, self._is_searching = seed, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of PyTorch; None for other modules, which the next finders find."""
        if name != "torch" or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = find_spec(name)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        module.manual_seed(self._seed)


def _find_module(modules: Mapping[tuple[str, str], str], value: Any) -> Any | None:
    """Return our module for an instance of a class in `modules`; None for other values."""
    for cls in type(value).__mro__:
        if name := modules.get((cls.__module__, cls.__name__)):
            return import_module(name)
    return None
