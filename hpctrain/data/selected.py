"""Samples at given indexes of a data set, such as those that a sampler selects for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.core import trees
from hpctrain.data.dataset import Samples


@dataclass(frozen=True, eq=False)
class SelectedSamples:
    """The samples at `indexes`, int64 (n,), of `samples`; an index may occur several times."""

    samples: Samples
    indexes: np.ndarray

    def __len__(self) -> int:
        """Return the number of indexes."""
        return len(self.indexes)

    @property
    def sample_shape(self) -> Any:
        """A sample's shape; the first sample is read."""
        return trees.sample_shape(self.rows(np.arange(1))[0])

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return arrays (x, y) of the samples at `indexes` of the selection."""
        return self.samples.rows(self.indexes[indexes], epoch)
