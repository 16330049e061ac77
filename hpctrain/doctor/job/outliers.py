"""Outliers among many figures, by median and MAD, which a few wild figures cannot move.

    seconds  1.0  1.0  1.1  1.1  9.0        median 1.1, MAD 0.1; 9.0 lies beyond 1.65

The limit is the median and 5 standard deviations, estimated as 1.4826 MAD, and at least half of
the median more: a smaller difference costs a run little. Lower medians are used, so that even of
two figures the larger one can be an outlier, and up to half may be slow.

Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
absolute deviation around the median", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SIGMAS, OF_NORMAL = 5, 1.4826  # MADs of a normal distribution in its standard deviation
MIN_MARGIN = 0.5  # of the median


@dataclass(frozen=True)
class MedianMad:
    """Median and MAD of figures, and the limit above which a figure is an outlier."""

    median: float
    mad: float
    limit: float

    def times(self, value: float) -> str:
        """Return "9.2 x" the median."""
        return f"{value / self.median:.1f} x"


def median_mad(values: Sequence[float], margin: float = MIN_MARGIN) -> MedianMad:
    """Return the statistics of `values`, one or more; the limit is at least `margin` beyond."""
    middle = median_low(values)
    mad = median_low([abs(value - middle) for value in values])
    return MedianMad(middle, mad, middle + max(SIGMAS * OF_NORMAL * mad, margin * middle))
