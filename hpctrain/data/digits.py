"""scikit-learn's digits: 1,797 real 8x8 images of handwritten digits (Alpaydin, Kaynak, 1998).

The images are part of the scikit-learn wheel, so nothing is downloaded.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.data.augment import AugmentOptions
from hpctrain.data.dataset import Dataset, Split, make_split

_INSTALL_HINT = "the digits come with scikit-learn; run: pip install 'hpctrain[datasets]'"


@config.options
class DigitsOptions(AugmentOptions):
    """`[data] kind = "digits"`."""

    def load(self, seed: int) -> Split:
        """Return 1,437 training and 360 test images, float32 (n, 8, 8) in 0 .. 1; 10 classes.

        The stratified split does not depend on `seed`, so runs with different seeds are tested on
        the same images. Raises UsageError if scikit-learn is not installed.
        """
        try:  # imported here: only this data set needs it, and the import takes a second
            from sklearn import datasets, model_selection
        except ImportError as error:
            raise UsageError(f"{_INSTALL_HINT} ({error})") from None
        arrays = _load_and_split(datasets, model_selection)
        x, x_test, y, y_test = (array.copy() for array in arrays)
        return self.augment(make_split(Dataset(x, y), Dataset(x_test, y_test), "digits"), seed)


@cache  # read once per process, even with many ranks as threads or many trainings in one script
def _load_and_split(datasets: ModuleType, model_selection: ModuleType) -> tuple[np.ndarray, ...]:
    digits = datasets.load_digits()
    x = (digits.images / 16).astype(np.float32)  # the pixels are 0 .. 16
    arrays = model_selection.train_test_split(
        x, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    return tuple(arrays)
