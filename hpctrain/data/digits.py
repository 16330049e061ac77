"""scikit-learn's digits: 1,797 real 8x8 images of handwritten digits (Alpaydin, Kaynak, 1998).

The images are a file of the scikit-learn wheel, so nothing is downloaded. The file is read without
importing scikit-learn, which would take a second and 110 MB on every rank.

`digits_split.npy` has the order of the images: first 1,437 for training, then 360 for testing. It
is the result of scikit-learn's `train_test_split(..., test_size=0.2, random_state=0, stratify=y)`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import numpy as np

from hpctrain import config
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Dataset, Split, make_split
from hpctrain.data.package_file import package_file

TRAINING_IMAGES = 1437
CLASSES = 10


@config.options
class DigitsOptions(ArrayOptions):
    """`[data] kind = "digits"`."""

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return 1,437 training and 360 test images, float32 (n, 8, 8) in 0 .. 1; 10 classes.

        The stratified split does not depend on `seed`, so runs with different seeds are tested on
        the same images. Raises UsageError if scikit-learn is not installed.
        """
        x, y = (array.copy() for array in _read())
        train = Dataset(x[:TRAINING_IMAGES], y[:TRAINING_IMAGES])
        test = Dataset(x[TRAINING_IMAGES:], y[TRAINING_IMAGES:])
        return self.finish(make_split(train, test, "digits", CLASSES), seed)


@cache  # read once per process, even with many ranks as threads or many trainings in one script
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels, those for training first."""
    file = package_file("sklearn", "datasets/data/digits.csv.gz", "scikit-learn")
    with resources.files(__package__).joinpath("digits_split.npy").open("rb") as split:
        rows = np.loadtxt(file, np.uint8, delimiter=",")[np.load(split)]
    # A row has 64 pixels, 0 .. 16, and the label.
    return (rows[:, :64] / np.float32(16)).reshape(-1, 8, 8), rows[:, 64].astype(np.int64)
