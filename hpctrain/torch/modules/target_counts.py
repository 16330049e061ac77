"""The targets that a mean of PyTorch counts: each by the weight of its class, none if ignored.

    CrossEntropyLoss(weight=w, ignore_index=i)      sum of w[y] l(y) / sum of w[y],  over y != i

The divisor depends on every rank's targets. It is computed from the number of targets of each
class: sums of integers have the same bits in any order, so that it is the same on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from hpctrain.core.errors import UsageError


class TargetCounts(Protocol):
    """Counts the targets of samples; `counts` of shares may be added."""

    def counts(self, targets: Any) -> np.ndarray | None:
        """Return numbers of targets, float64 (k,); None if each sample counts the same."""

    def total(self, counts: np.ndarray) -> float:
        """Return the divisor of the mean over the targets with these `counts`."""


class ClassCounts:
    """The targets of a CrossEntropyLoss or NLLLoss; its attributes are read at each call."""

    def __init__(self, loss: nn.CrossEntropyLoss | nn.NLLLoss):
        self._loss = loss

    def counts(self, targets: torch.Tensor) -> np.ndarray | None:
        """Return the number of targets of each class, or of all without weights."""
        if targets.is_floating_point():  # probabilities: PyTorch divides by the number of samples
            return None
        is_used, weight = targets != self._loss.ignore_index, self._loss.weight
        if weight is None:
            n = np.count_nonzero(is_used.numpy()) if is_used.is_cpu else int(is_used.sum())
            return np.array([n], np.float64)
        used = targets[is_used]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < len(weight):
            raise UsageError(
                f"loss: expected labels in 0 .. {len(weight) - 1}, as it has {len(weight)} "
                f"weights, seen {int(used.min())} .. {int(used.max())}"
            )
        return torch.bincount(used.reshape(-1), minlength=len(weight)).double().numpy()

    def total(self, counts: np.ndarray) -> float:
        """Return the sum of the weights of the targets."""
        if self._loss.weight is None:
            return float(counts[0])
        return float(counts @ self._loss.weight.detach().double().cpu().numpy())


class UserCount:
    """A function of the targets of a batch that returns their number or their summed weight."""

    def __init__(self, count: Callable[[Any], Any]):
        self._count = count

    def counts(self, targets: Any) -> np.ndarray:
        """Return the result of the function."""
        return np.array([float(self._count(targets))])

    def total(self, counts: np.ndarray) -> float:
        """Return the sum of its results."""
        return float(counts[0])
