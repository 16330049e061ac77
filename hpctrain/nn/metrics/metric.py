"""A metric: sums over the samples of a set, and the value that they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.trees import sample_count
from hpctrain.nn.metrics.scores import Scores

Value = float | list[list[int]] | None
#: Gets outputs (n, ...) of an evaluation on the host, and the targets of these samples.
Observer = Callable[[np.ndarray, Any], None]


MAX_EXAMPLE = 64  #: samples that are read to bind metrics


class UndefinedError(ArithmeticError):
    """A metric that the samples of a set do not define, such as an AUC over a single class."""


@dataclass(frozen=True)
class Metric:
    """A metric of your own, from sums over the samples of a set.

    `sums(outputs, targets)` gets the model's outputs (n, ...) and the targets of some samples, as
    NumPy arrays, and returns numbers or arrays by name, whose shapes do not depend on n. They are
    added in float64 over all samples and ranks. `finish(sums)` returns the value, a number, or
    None where it is not defined; an ArithmeticError or a ValueError, as of math.log(0), says so,
    too.
    """

    name: str
    sums: Callable[[Any, Any], Mapping[str, Any]]
    finish: Callable[[Mapping[str, Any]], float | None]

    def __post_init__(self) -> None:
        """Raise UsageError for a name that no row can have, and for what cannot be called."""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UsageError(
                f"metrics: expected a name of letters, digits and _, seen {self.name!r}"
            )
        for part in ("sums", "finish"):
            if not callable(getattr(self, part)):
                raise UsageError(f"metric '{self.name}': expected a function as `{part}`")


class Observation(NamedTuple):
    """The outputs and targets of some samples, and both as scores where the task has them."""

    outputs: np.ndarray
    targets: Any
    scores: Scores | None


class Summand(NamedTuple):
    """A metric bound to a model: a vector that is added over samples, and the value of the sum."""

    name: str
    size: int  #: of the vector, float64
    measure: Callable[[Observation], np.ndarray]
    finish: Callable[[np.ndarray], Value]
    is_exact: bool = True  #: whole numbers, which have the same sum in any order


def zero_example(model: Any, samples: Any) -> tuple[np.ndarray, Any]:
    """Return zeros as the outputs of a few `samples`, and the targets; UsageError if none fit."""
    shape = model.output_shape_for(samples)
    _, targets = samples.rows(np.arange(min(len(samples), MAX_EXAMPLE)))
    return np.zeros((sample_count(targets), *shape), np.float32), targets


def bind_own(metric: Metric, outputs: np.ndarray, targets: Any) -> Summand:
    """Return a user's metric for sums with the shapes that a few samples give."""
    shapes = {name: x.shape for name, x in _own_sums(metric, outputs, targets).items()}
    size = sum(map(prod, shapes.values()))

    def measure(observation: Observation) -> np.ndarray:
        arrays = _own_sums(metric, observation.outputs, observation.targets)
        if {name: x.shape for name, x in arrays.items()} != shapes:
            raise UsageError(
                f"metric '{metric.name}': expected sums of the shapes {shapes} for any samples, "
                f"seen { {name: x.shape for name, x in arrays.items()} }"
            )
        return np.concatenate([x.ravel() for x in arrays.values()])

    def finish(total: np.ndarray) -> Value:
        ends = np.cumsum([prod(shape) for shape in shapes.values()])[:-1]
        parts = zip(shapes.items(), np.split(total, ends), strict=True)
        try:
            value = metric.finish({n: x.reshape(shape)[()] for (n, shape), x in parts})
        except ArithmeticError:
            raise
        except ValueError as error:
            raise UndefinedError(error) from error
        except Exception as error:
            raise _failed(metric, error) from error
        if value is not None and not isinstance(value, int | float | np.number):
            raise UsageError(
                f"metric '{metric.name}': expected a number or None from `finish`, seen a "
                f"{type(value).__name__}"
            )
        return None if value is None else float(value)

    return Summand(metric.name, size, measure, finish, is_exact=False)


def _own_sums(metric: Metric, outputs: np.ndarray, targets: Any) -> dict[str, np.ndarray]:
    try:
        sums = metric.sums(outputs, targets)
        arrays = {name: np.asarray(x, np.float64) for name, x in sums.items()}
    except Exception as error:
        raise _failed(metric, error) from error
    if not arrays:
        raise UsageError(f"metric '{metric.name}': expected sums by name from `sums`, seen none")
    return arrays


def _failed(metric: Metric, error: Exception) -> UsageError:
    return UsageError(f"metric '{metric.name}': {type(error).__name__}: {error}")
