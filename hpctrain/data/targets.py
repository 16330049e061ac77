"""The targets of a data set that are known before training, to be checked by the loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpctrain.data.augment import AugmentedSamples
from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.resized import ResizedSamples
from hpctrain.data.scaling import ScaledSamples
from hpctrain.data.stored import StoredSamples

SAMPLES_PER_CHECK = 16  #: samples of other sets that are read to see their targets


def unwrap(samples: Samples) -> Samples:
    """Return the data set without changes of its samples or its length."""
    while isinstance(samples, AugmentedSamples | ResizedSamples | ScaledSamples):
        samples = samples.samples
    return samples


def known_targets(samples: Samples) -> Any:
    """Return all targets of samples in memory or in mapped files, else the first few."""
    base = unwrap(samples)
    if isinstance(base, Dataset | StoredSamples):
        return base.y
    return base.rows(np.arange(min(len(base), SAMPLES_PER_CHECK)))[1]
