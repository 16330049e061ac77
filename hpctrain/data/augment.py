"""Random shifts and flips of images: different in each epoch, the same on any number of ranks.

The shift and the flip of a sample are functions of (seed, epoch, index of the sample): word number
`index` of a Philox stream keyed by (seed, epoch) (Salmon et al., 2011). So ranks need not
communicate, and a checkpoint needs no state of a generator.

    bits of the word     0: mirrored?      1 - 16: rows down      17 - 32: columns right
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import pydantic

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.data.dataset import DerivedSamples, Samples, Split
from hpctrain.data.reading import ReadOptions, with_reading
from hpctrain.data.scaling import BLOCKS, Rule, Scale, block_moments, scale_from, scale_split

# Tells this stream from the stream of `sampler.order`, which has the same key.
_INITIAL_COUNTER = (0, 0, 0, 2)


class AugmentedSamples(DerivedSamples):
    """Images (h, w) or (h, w, channels), shifted and mirrored at random when they are read."""

    def __init__(self, samples: Samples, seed: int, shift: int, flip: bool) -> None:
        """Shift each image by up to `shift` pixels along both axes; with `flip`, mirror half."""
        if len(samples.sample_shape) not in (2, 3):
            raise UsageError(
                "[data] shift and flip: expected images (h, w) or (h, w, channels), seen samples "
                f"{samples.sample_shape}; leave both out"
            )
        self.samples, self.seed, self.shift, self.flip = samples, seed, shift, flip
        self._epoch, self._words = -1, np.empty(0, np.uint64)

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of the samples at `indexes`, with the random changes of `epoch`."""
        x, y = self.samples.rows(indexes, epoch)
        if epoch != self._epoch:
            self._epoch, self._words = epoch, draw_words(self.seed, epoch, len(self))
        random_words = self._words[indexes]
        shift_count = 2 * self.shift + 1
        down, right = (
            (random_words >> np.uint64(bit) & np.uint64(0xFFFF)).astype(int) * shift_count // 2**16
            for bit in (1, 17)
        )
        x = shift_images(x, down, right, self.shift)
        is_mirrored = (random_words & np.uint64(1)).astype(bool) & self.flip
        x[is_mirrored] = x[is_mirrored][:, :, ::-1]
        return x, y


def draw_words(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the random words of `n` samples in `epoch`, uint64 (n,)."""
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=_INITIAL_COUNTER).random_raw(n)


def shift_images(x: np.ndarray, down: np.ndarray, right: np.ndarray, max_shift: int) -> np.ndarray:
    """Return images x (n, h, w, ...), image i shifted by down[i] - max_shift, right[i] - max_shift.

    Pixels from beyond the border are 0.
    """
    pad_widths = [(0, 0), (max_shift, max_shift), (max_shift, max_shift), *[(0, 0)] * (x.ndim - 3)]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, pad_widths), x.shape[1:3], (1, 2))
    images = windows[np.arange(len(x)), 2 * max_shift - down, 2 * max_shift - right]
    return np.moveaxis(images, (-2, -1), (1, 2)).copy()


@config.options
class ArrayOptions(ReadOptions):
    """Keys of `[data]` for arrays: their scale, random changes of training images, reading."""

    PATHS: ClassVar[tuple[str, ...]] = ()  #: keys that name files
    scale: Rule = "auto"
    shift: Annotated[int, pydantic.Field(ge=0)] = 0
    flip: bool = False

    def finish(self, split: Split, seed: int) -> Split:
        """Return `split` with the changes that the keys ask for: of images, scale and reading.

        "standard" and "minmax" read all training samples; training measures them on all ranks.
        """
        scale = Scale(self.scale)
        if self.scale in ("standard", "minmax"):
            scale = scale_from(block_moments(split.train, range(BLOCKS)), self.scale)
        if self.shift or self.flip:
            split = split._replace(train=AugmentedSamples(split.train, seed, self.shift, self.flip))
        return with_reading(scale_split(split, scale), self)
