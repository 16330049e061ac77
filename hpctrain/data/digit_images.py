"""Images of handwritten digits that belong to the package: `digits` and `mnist`.

    digits.npz   1,797 images of 8 x 8, integers 0 .. 16 (Alpaydin, Kaynak, 1998)
    mnist.npz    5,000 images of 28 x 28, integers 0 .. 255 (LeCun et al., 1998)

The splits are stratified and do not depend on a seed, so all runs are tested on the same images.
THIRD-PARTY.md has the origin of the images, and their licences.
"""

from __future__ import annotations

from importlib import resources

import numpy as np

from hpctrain.core import config
from hpctrain.data.augment import ArrayOptions
from hpctrain.data.dataset import Dataset, Split
from hpctrain.data.npy import read_arrays

CLASSES = 10


@config.options
class DigitsOptions(ArrayOptions):
    """`[data] kind = "digits"`."""

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return 1,437 training and 360 test images, float32 (n, 8, 8) in 0 .. 1."""
        return self.finish(_read_split("digits", np.float32(16)), seed)


@config.options
class MnistOptions(ArrayOptions):
    """`[data] kind = "mnist"`."""

    def load(self, seed: int, finite: bool = True) -> Split:
        """Return 4,000 training and 1,000 test images, float32 (n, 28, 28) in 0 .. 1."""
        return self.finish(_read_split("mnist", np.float32(255)), seed)


def _read_split(name: str, white: np.float32) -> Split:
    """Return the training and the test set of `name`, with `white` as 1."""
    with resources.as_file(resources.files(__package__) / f"{name}.npz") as path:
        arrays = read_arrays(path)
    train, test = (
        Dataset(arrays[f"x{part}"] / white, arrays[f"y{part}"]) for part in ("", "_test")
    )
    return Split(train, test, CLASSES)
