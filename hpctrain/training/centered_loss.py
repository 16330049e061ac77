"""The offset of the sums from which r2 is computed: of a run, or of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.data import Samples, known_targets


@contextmanager
def centered_loss(model: Any, samples: Samples) -> Iterator[None]:
    """Let a loss that can do so subtract the mean of the targets before it sums them."""
    loss = model.loss
    if hasattr(loss, "centered"):
        model.loss = loss.centered(known_targets(samples))
    try:
        yield
    finally:
        model.loss = loss
