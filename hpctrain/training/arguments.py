"""Arguments of the Trainer as users write them: names, pairs of arrays, options."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain import engines, nn, optim
from hpctrain.core import config, frameworks
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.trees import map_arrays
from hpctrain.data import Dataset, Samples, known_targets
from hpctrain.engines.options import EngineOptions
from hpctrain.gradients.replica import TrainableModel
from hpctrain.optim import Optimizer

ENGINE_MEMBERS = [name for name in vars(EngineOptions) if not name.startswith("_")]
DEFAULT_RATES = {"sgd": 0.01, "adamw": 0.001}  #: defaults of Keras, for optimizers given by name


def as_model(model: Any) -> TrainableModel:
    """Return `model`, a torch.nn.Module wrapped; raise UsageError for anything else."""
    if isinstance(model, nn.Model):
        return model
    if guest := frameworks.as_model(model):
        return guest
    raise UsageError(
        f"model: expected an ht.nn.Model or a torch.nn.Module, seen {_described(model)}; write "
        "ht.nn.Model([ht.nn.Linear(32), ht.nn.ReLU(), ht.nn.Linear(10)], input_shape=64)"
    )


def as_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer; the names "sgd" and "adamw" stand for one with the default rate."""
    is_pair = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    if is_pair and hasattr(optimizer, "rate"):  # optimizers of Optax have none
        return optimizer
    if not isinstance(optimizer, str):
        raise UsageError(
            f"optimizer: expected one such as ht.optim.sgd(rate=0.1), or a name, seen "
            f"{_described(optimizer)}"
        )
    config.pick(optim.OPTIMIZERS, optimizer, "optimizer")
    if optimizer in DEFAULT_RATES:
        make = getattr(optim, optimizer)
        return make(rate=DEFAULT_RATES[optimizer])
    raise UsageError(f"optimizer '{optimizer}' needs a rate: write ht.optim.{optimizer}(rate=...)")


def as_engine(engine: Any) -> Any:
    """Return the options of an engine; a name stands for the engine's default options."""
    if isinstance(engine, str):
        return config.pick(engines.ENGINES, engine, "engine")()
    if callable(getattr(engine, "build", None)) and not isinstance(engine, type):
        if missing := [x for x in ENGINE_MEMBERS if not hasattr(engine, x)]:
            raise UsageError(
                f"engine: {_described(engine)} has no {', '.join(missing)}: derive it from "
                "hpctrain.engines.options.EngineOptions"
            )
        return engine
    raise UsageError(
        f"engine: expected a name ({', '.join(engines.ENGINES)}) or options such as "
        f'ht.engines.AllReduce(algorithm="ring"), seen {_described(engine)}'
    )


def as_samples(samples: Any, name: str, finite: bool = True) -> Samples:
    """Return `samples`, or the Dataset of a pair (x, y) of arrays or trees of arrays."""
    if isinstance(samples, Samples):
        return samples
    if (guest_samples := frameworks.as_samples(samples, finite)) is not None:
        return guest_samples
    if isinstance(samples, (tuple, list)) and len(samples) == 2:
        x, y = map_arrays(np.asarray, tuple(samples))
        return Dataset(x, y, finite)
    raise UsageError(
        f"{name}: expected a pair of arrays (x, y), an ht.data.Dataset, or an object with `rows`, "
        f"`sample_shape` and a length, seen {_described(samples)}"
    )


def check_sets(model: Any, loss: Any, **sets: Samples | None) -> None:
    """Raise UsageError for samples or targets that the model or its loss does not accept."""
    for name, samples in sets.items():
        if samples is None:
            continue
        output_shape = model.output_shape_for(samples)
        if fault := loss.find_fault(known_targets(samples), output_shape):
            raise UsageError(f"{name} set: {fault}")


def _described(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; call it to make one"
    return brief(value) if isinstance(value, str) else type(value).__name__
