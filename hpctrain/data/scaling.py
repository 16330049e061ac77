"""Scaling of samples: one rule for files of every kind, the same numbers on any number of ranks.

    auto        uint8 samples, such as images, are divided by 255; others stay as they are
    standard    (x - mean) / standard deviation, of the training samples
    minmax      (x - smallest) / (largest - smallest), of the training samples
    none        samples are as in their file

Numbers of `standard` and `minmax` belong to a column of samples (columns,), to a channel of images
(h, w, channels), and to all pixels of images (h, w). They are computed in float64 from BLOCKS
blocks of rows. Blocks are shared among ranks and merged in their order (Chan, Golub, LeVeque,
"Algorithms for computing the sample variance", 1983), so any number of ranks gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import namespace
from hpctrain.data.dataset import DerivedSamples, Samples, Split, in_pieces

Rule = Literal["auto", "standard", "minmax", "none"]
BLOCKS = 64  #: of the training samples; more ranks would not be faster
WORDS = {
    "standard": "minus its mean, divided by its standard deviation",
    "minmax": "minus its smallest value, divided by its range",
}


@dataclass(frozen=True, eq=False)
class Scale:
    """A rule; with "standard" or "minmax" its numbers, float64 (columns,) or (channels,)."""

    rule: Rule = "none"
    shift: np.ndarray | None = None
    divisor: np.ndarray | None = None

    def changes(self, dtype: np.dtype) -> bool:
        """Return whether samples of `dtype` change."""
        return self.shift is not None or (self.rule == "auto" and dtype == np.uint8)

    def apply(self, x: Any) -> Any:
        """Return samples `x` (n, ...), scaled: float32, or float64 if `x` is; others unchanged."""
        if not self.changes(_dtype_of(x)):
            return x
        if self.shift is None or self.divisor is None:
            return x.astype(np.float32) / 255.0
        shift, divisor = map(namespace(x).asarray, (self.shift, self.divisor))
        is_double = x.dtype.kind == "f" and x.dtype.itemsize == 8
        return ((x - shift) / divisor).astype(np.float64 if is_double else np.float32)

    def describe(self, dtype: np.dtype, rows: int) -> str:
        """Return the rule in words, for `rows` training samples of `dtype`."""
        if self.shift is None:
            action = "divided by 255" if self.changes(dtype) else "used as they are"
            return f"{dtype} samples are {action} ({self.rule})"
        columns_text = (
            f"each of {len(self.shift)} columns" if len(self.shift) > 1 else "each number"
        )
        return f"{columns_text} {WORDS[self.rule]}, over {rows:,} training samples ({self.rule})"

    def as_json(self) -> dict[str, Any]:
        """Return the scale for a manifest."""
        numbers = {"shift": self.shift, "divisor": self.divisor}
        return {"rule": self.rule} | {
            name: array.tolist() for name, array in numbers.items() if array is not None
        }

    @staticmethod
    def from_json(table: Mapping[str, Any] | None) -> Scale:
        """Return the scale of a manifest, "none" without one."""
        table = table or {"rule": "none"}
        arrays = [
            np.array(table[name]) if table.get(name) else None for name in ("shift", "divisor")
        ]
        return Scale(table["rule"], *arrays)

    def must_equal(self, recorded: Scale, samples: Samples, source: str) -> None:
        """Raise UsageError, which begins with `source`, if `recorded` scales otherwise.

        `samples`: not scaled; "auto" leaves some of them as they are.
        """
        if self.as_json() == recorded.as_json():
            return
        dtype = _dtype_of(samples.rows(np.arange(0))[0])
        if self.changes(dtype) or recorded.changes(dtype):
            number_text = " of other numbers" * (self.rule == recorded.rule)
            raise UsageError(
                f"{source}: expected samples scaled by '{recorded.rule}', with which this run "
                f"began, seen '{self.rule}'{number_text}; give samples that are scaled as before, "
                "or begin another run"
            )

    def must_fit(self, sample_shape: tuple[int, ...], source: str) -> Scale:
        """Return self; raise UsageError, which begins with `source`, for other samples."""
        columns = _column_count(sample_shape)
        if self.shift is not None and len(self.shift) != columns:
            raise UsageError(
                f"{source}: expected a scale of {columns} numbers for samples {sample_shape}, "
                f"seen {len(self.shift)}"
            )
        return self


@dataclass(frozen=True, eq=False)
class ScaledSamples(DerivedSamples):
    """`samples`, scaled when they are read."""

    samples: Samples
    scale: Scale

    def rows(self, indexes: np.ndarray, epoch: int = 0) -> tuple[Any, Any]:
        """Return (x, y) of the samples at `indexes`, x scaled."""
        x, y = self.samples.rows(indexes, epoch)
        return self.scale.apply(x), y


def scale_of(samples: Samples) -> Scale | None:
    """Return the scale of samples that are scaled when they are read; None for others."""
    part: object = samples
    while isinstance(part, DerivedSamples) and not isinstance(part, ScaledSamples):
        part = part.samples
    return part.scale if isinstance(part, ScaledSamples) else None


def scale_split(split: Split, scale: Scale) -> Split:
    """Return `split` with both sets scaled, where `scale` changes them."""

    def scaled(samples: Samples) -> Samples:
        x, _ = samples.rows(np.arange(0))
        return ScaledSamples(samples, scale) if scale.changes(_dtype_of(x)) else samples

    test = None if split.test is None else scaled(split.test)
    return split._replace(train=scaled(split.train), test=test)


def block_moments(samples: Samples, own_blocks: Iterable[int]) -> np.ndarray:
    """Return the moments of `own_blocks` of training `samples`, float64, 0 for other blocks.

    Each rank has its own blocks, so the sum of all ranks' arrays covers every block. Rows with a
    value that is not finite do not count.
    """
    table = np.zeros((BLOCKS, len(Moments._fields), _column_count(samples.sample_shape)))
    for block in own_blocks:
        first, end = (len(samples) * i // BLOCKS for i in (block, block + 1))
        parts = (_compute_moments(x) for x, _ in in_pieces(samples, np.arange(first, end)))
        table[block] = np.array(reduce(_merge_moments, parts, Moments(*table[block])))
    return table


def scale_from(table: np.ndarray, rule: Rule) -> Scale:
    """Return the "standard" or "minmax" scale from the moments over all blocks."""
    total_moments = reduce(_merge_moments, (Moments(*block) for block in table))
    if rule == "standard":
        shift, width = (
            total_moments.mean,
            np.sqrt(total_moments.squares / np.maximum(total_moments.rows, 1)),
        )
    else:
        shift, width = total_moments.low, total_moments.high - total_moments.low
    return Scale(rule, shift, np.where(width > 0, width, 1.0))


class Moments(NamedTuple):
    """Moments of the rows of some blocks, float64 (columns,) each; 0 where there are no rows."""

    rows: np.ndarray
    mean: np.ndarray
    squares: np.ndarray  #: the sum of squared differences from the mean
    low: np.ndarray
    high: np.ndarray


def _dtype_of(x: Any) -> np.dtype:
    """Return the dtype of samples; object for a dict or a tuple of arrays, which no rule scales."""
    return getattr(x, "dtype", np.dtype(object))


def _column_count(sample_shape: tuple[int, ...]) -> int:
    """Return the length of the arrays of a scale."""
    return 1 if len(sample_shape) == 2 else sample_shape[-1]


def _compute_moments(x: np.ndarray) -> Moments:
    """Return the moments of samples `x` (n, ...)."""
    values = x.reshape(-1, _column_count(x.shape[1:])).astype(np.float64)
    values = values[np.isfinite(values).all(axis=1)]
    if not len(values):
        return Moments(*np.zeros((len(Moments._fields), values.shape[1])))
    mean = values.mean(axis=0)
    squares = np.square(values - mean).sum(axis=0)
    count = np.full_like(mean, len(values))
    return Moments(count, mean, squares, values.min(axis=0), values.max(axis=0))


def _merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments over both sets of rows."""
    if not a.rows.any() or not b.rows.any():
        return a if a.rows.any() else b
    count, difference = a.rows + b.rows, b.mean - a.mean
    return Moments(
        count,
        a.mean + difference * b.rows / count,
        a.squares + b.squares + difference**2 * a.rows * b.rows / count,
        np.minimum(a.low, b.low),
        np.maximum(a.high, b.high),
    )
