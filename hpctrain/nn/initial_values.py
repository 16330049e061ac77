"""The initial values of parameters: each has a random stream of its own."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from hpctrain.nn.layer import Parameter


def initial_values(
    parameters: Mapping[str, Parameter], seed: int, names: Container[str] | None = None
) -> dict[str, np.ndarray]:
    """Return the initial values of each parameter, float64; they depend on `seed` and shapes alone.

    Each parameter has its own random stream, so a new shape of one parameter changes no value of
    another, and the parameters `names`, by default all, may be drawn alone.
    """
    return {
        name: parameter.init(
            np.random.Generator(np.random.Philox(key=np.array([seed, i], np.uint64))),
            parameter.shape,
        )
        for i, (name, parameter) in enumerate(parameters.items())
        if names is None or name in names
    }
