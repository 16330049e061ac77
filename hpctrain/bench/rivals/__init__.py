"""Other libraries, measured on the same buffers in the same run, where they are installed.

Nothing of hpctrain needs them. This room is the only one that imports torch and horovod, and only
when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from hpctrain import config
from hpctrain.world import World

TIMEOUT_S = 60.0


#: (samples, labels) -> the summed loss of this rank's share, after one step of training.
Step = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class Dense:
    """A model of dense layers with ReLU between, and how it is trained: by SGD."""

    layers: Sequence[tuple[np.ndarray, np.ndarray]]  #: (inputs, outputs) and (outputs,), to copy
    sgd: Mapping[str, Any]  #: rate and the like, by PyTorch's names


class Rival(Protocol):
    """A library that has joined the job; `about` tells version and settings."""

    about: str

    def offers(self, operation: str, dtype: np.dtype) -> bool:
        """Return whether it does `operation` in place, on arrays of `dtype`."""

    def call(self, operation: str, x: np.ndarray, op: str) -> Callable[[], None]:
        """Return a call of `operation` on flat `x` itself."""

    def awake(self) -> AbstractContextManager[None]:
        """Return what its calls are made in: outside, no thread of it disturbs the others."""

    def step(self, dense: Dense, alone: bool) -> Step:
        """Return what trains `dense` on all ranks; `alone`, without communication."""

    def close(self) -> None:
        """Leave the job; collective."""


#: name: (module of this room, class in it)
RIVALS = {"horovod": ("horovod", "Horovod"), "gloo": ("gloo", "Gloo")}


def names(text: str) -> list[str]:
    """Return the rivals that `text` lists; raise UsageError for one that is unknown."""
    listed = [name.strip() for name in text.split(",") if name.strip()]
    for name in listed:
        config.pick(RIVALS, name, "rival")
    return list(dict.fromkeys(listed))


def join(world: World, wanted: Iterable[str]) -> tuple[dict[str, Rival], dict[str, str]]:
    """Return the rivals that joined and, for the others, why they are left out; collective.

    What one rank lacks all leave out.
    """
    joined: dict[str, Rival] = {}
    skipped: dict[str, str] = {}
    for name in wanted:
        found, why = _found(world, name)
        reasons = [one for one in world.gather(why) if one]
        if found is None or reasons:
            skipped[name] = reasons[0]
        else:
            joined[name] = found(world)
    return joined, skipped


def about(joined: Mapping[str, Rival], skipped: Mapping[str, str]) -> dict[str, str]:
    """Return what a reader is to know of each rival."""
    left_out = {name: f"skipped: {why}" for name, why in skipped.items()}
    return {name: rival.about for name, rival in joined.items()} | left_out


def _found(world: World, name: str) -> tuple[Callable[[World], Rival] | None, str]:
    module, kind = RIVALS[name]
    if world.transport != "mpi":
        return None, "ranks are threads of one process"
    try:
        return getattr(import_module(f"{__name__}.{module}"), kind), ""
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        return None, f"not installed on {world.host} ({error})"
