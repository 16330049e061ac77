"""Images shifted and mirrored at random: anew in each epoch, the same on any number of ranks.

The change of a sample is a function of (seed, epoch, its index in the set): word number `index`
of a Philox stream keyed by (seed, epoch) (Salmon et al., 2011). No rank draws for another, and
there is no state to save.

    bits of the word     0: mirrored?      1 - 16: rows down      17 - 32: columns right
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pydantic

from hpctrain import config
from hpctrain.core.errors import UsageError
from hpctrain.data.dataset import Samples, Split

# Separates this stream from that of `sampler.order`, which has the same key.
_STREAM = (0, 0, 0, 2)


class Augmented:
    """`samples`, images (h, w) or (h, w, channels), changed at random when read."""

    def __init__(self, samples: Samples, seed: int, shift: int, flip: bool) -> None:
        """Shift each image by up to `shift` pixels in both directions; `flip` half of them."""
        if len(samples.sample_shape) not in (2, 3):
            raise UsageError(
                "[data] shift and flip: expected images (h, w) or (h, w, channels), seen samples "
                f"{samples.sample_shape}; leave both out"
            )
        self.samples, self.seed, self.shift, self.flip = samples, seed, shift, flip
        self._epoch, self._words = -1, np.empty(0, np.uint64)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.samples.sample_shape

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes` as they are in `epoch`."""
        x, y = self.samples.rows(indexes, epoch)
        if epoch != self._epoch:
            self._epoch, self._words = epoch, words(self.seed, epoch, len(self))
        w = self._words[indexes]
        down, right = ((w >> np.uint64(bit) & np.uint64(0xFFFF)).astype(int) for bit in (1, 17))
        places = 2 * self.shift + 1
        x = shifted(x, down * places // 2**16, right * places // 2**16, self.shift)
        mirrored = (w & np.uint64(1)).astype(bool) & self.flip
        x[mirrored] = x[mirrored][:, :, ::-1]
        return x, y


def words(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the random words of `n` samples in `epoch`, uint64 (n,)."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=_STREAM).random_raw(n)


def shifted(x: np.ndarray, down: np.ndarray, right: np.ndarray, middle: int) -> np.ndarray:
    """Return images x (n, h, w, ...) shifted by (down - middle, right - middle), per image.

    Pixels from beyond the border are 0.
    """
    edges = [(0, 0), (middle, middle), (middle, middle), *[(0, 0)] * (x.ndim - 3)]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, edges), x.shape[1:3], (1, 2))
    at = windows[np.arange(len(x)), 2 * middle - down, 2 * middle - right]
    return np.moveaxis(at, (-2, -1), (1, 2)).copy()


@config.options
class AugmentOptions:
    """Keys of `[data]` for sets of images: training images differ from epoch to epoch."""

    shift: Annotated[int, pydantic.Field(ge=0)] = 0
    flip: bool = False

    def augmented(self, split: Split, seed: int) -> Split:
        """Return `split` with the training images changed as the keys say."""
        if not (self.shift or self.flip):
            return split
        return split._replace(train=Augmented(split.train, seed, self.shift, self.flip))
