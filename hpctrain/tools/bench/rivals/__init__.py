"""Other libraries, if installed, measured on the same buffers in the same run.

Nothing of hpctrain needs them. This package alone imports torch and horovod, and only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from hpctrain.core import config
from hpctrain.tools.bench import base
from hpctrain.world import World

TIMEOUT_S = 60.0


#: (samples, labels) -> the summed loss of this rank's share, after one step of training.
StepFunction = Callable[[np.ndarray, np.ndarray], float]


@dataclass(frozen=True)
class DenseModel:
    """A model of dense layers with ReLU in between, and its parameters of SGD."""

    layers: Sequence[tuple[np.ndarray, np.ndarray]]  #: (inputs, outputs) and (outputs,), to copy
    sgd_options: Mapping[str, Any]  #: rate and the like, by PyTorch's names


class Rival:
    """A library that has joined the job; `about` holds version and settings.

    This base offers no operation, has no thread that is awake between calls, and leaves nothing.
    """

    about: str

    def offers(self, operation: str, dtype: np.dtype) -> bool:
        """Return whether the library supports `operation` in place on arrays of `dtype`."""
        return False

    def call(self, operation: str, x: np.ndarray, op: str) -> Callable[[], None]:
        """Return a call of `operation`, which is offered, on flat `x` itself."""
        raise NotImplementedError

    def awake_context(self) -> AbstractContextManager[None]:
        """Return the context manager for calls; outside of it the library's threads sleep."""
        return nullcontext()

    def step(self, dense: DenseModel, without_communication: bool) -> StepFunction:
        """Return a training step of `dense`; on all ranks unless `without_communication`."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the job; collective."""


#: name: (module of this package, class in it); Gloo starts PyTorch's default group, so before "ddp"
RIVALS = {
    "horovod": ("horovod", "Horovod"),
    "gloo": ("gloo", "Gloo"),
    "ddp": ("pytorch_on_mpi", "Ddp"),
    "sync": ("pytorch_on_mpi", "Sync"),
}


def parse_names(text: str) -> list[str]:
    """Return the rivals listed in `text`, in the order of RIVALS; raise UsageError for others."""
    listed_names = [name.strip() for name in text.split(",") if name.strip()]
    for name in listed_names:
        config.pick(RIVALS, name, "rival")
    return [name for name in RIVALS if name in listed_names]


def join(world: World, names: Iterable[str]) -> tuple[dict[str, Rival], dict[str, str]]:
    """Return the rivals that joined, and for the others the reason for their absence; collective.

    A library that one rank lacks is left out on all ranks.
    """
    joined_rivals: dict[str, Rival] = {}
    skip_reasons: dict[str, str] = {}
    for name in names:
        rival_class, reason = _import_rival_class(world, name)
        absence_reasons = [text for text in world.gather(reason) if text]
        if rival_class is None or absence_reasons:
            skip_reasons[name] = absence_reasons[0]
        else:
            joined_rivals[name] = rival_class(world)
    return joined_rivals, skip_reasons


@contextmanager
def joined(
    world: World,
    names: Iterable[str],
    refuse: Callable[[Rival], str | None],
    skipped: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[dict[str, Rival], dict[str, str]]]:
    """Yield the rivals that take part, and a description of each name; close them; collective.

    `refuse` returns the reason why a rival cannot be measured; `skipped` has reasons for further
    names. Rank 0 prints the descriptions: version and settings, or the reason for the absence.
    """
    joined_rivals, absence_reasons = join(world, names)
    refusals = {name: reason for name, rival in joined_rivals.items() if (reason := refuse(rival))}
    measured_rivals = {name: rival for name, rival in joined_rivals.items() if name not in refusals}
    descriptions = {name: rival.about for name, rival in measured_rivals.items()}
    for name, reason in {**absence_reasons, **skipped, **refusals}.items():
        descriptions[name] = f"skipped: {reason}"
    base.print_lines(world, [f"# {name}: {text}" for name, text in descriptions.items()])
    try:
        yield measured_rivals, descriptions
    finally:
        for rival in joined_rivals.values():
            rival.close()


def _import_rival_class(world: World, name: str) -> tuple[Callable[[World], Rival] | None, str]:
    module, class_name = RIVALS[name]
    if world.transport != "mpi":
        return None, "ranks are threads of one process"
    try:
        return getattr(import_module(f"{__name__}.{module}"), class_name), ""
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        return None, f"not installed on {world.host} ({error})"
