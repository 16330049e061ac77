"""Names of an optimizer's parameters, by which ranks match gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

Named: TypeAlias = list[tuple[str, torch.Tensor]]


def positions(groups: Iterable[dict[str, Any]]) -> Named:
    """Return the parameters, named by their positions."""
    return [
        (f"parameter.{i}.{j}", parameter)
        for i, group in enumerate(groups)
        for j, parameter in enumerate(group["params"])
    ]


def name_parameters(
    groups: list[dict[str, Any]], named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> Named:
    """Return names and parameters; raise ValueError unless each parameter has a name of its own."""
    if named_parameters is None:
        return positions(groups)
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    counts = Counter(name for name, _ in named)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(repeated)}"
        )
    identities = {id(parameter) for _, parameter in named}
    missing = [name for name, p in positions(groups) if id(p) not in identities]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(missing[:8])} (by group and place)"
        )
    return named
