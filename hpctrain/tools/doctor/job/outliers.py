"""Outliers among many values, by median and MAD, which a few extreme values hardly change.

    seconds  1.0  1.0  1.1  1.1  9.0        median 1.1, MAD 0.1; 9.0 lies beyond 1.65

The limit is the median plus 5 standard deviations, estimated as 1.4826 MAD. It is at least 1.5
times the median, since smaller differences cost a run little. Lower medians are used, so that even
the larger of two values can be an outlier, and up to half of the values may be slow.

Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
absolute deviation around the median", 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

MAX_SIGMAS, MADS_PER_SIGMA = 5, 1.4826  # standard deviation of a normal distribution in MADs
MIN_RELATIVE_MARGIN = 0.5  # of the median


@dataclass(frozen=True)
class MedianMad:
    """Median and MAD of some values, and the limit above which a value is an outlier."""

    median: float
    mad: float
    limit: float

    def format_ratio(self, value: float) -> str:
        """Return `value` as a multiple of the median, such as "9.2 x"."""
        return f"{value / self.median:.1f} x"


def compute_median_mad(values: Sequence[float], margin: float = MIN_RELATIVE_MARGIN) -> MedianMad:
    """Return the statistics of a sequence of values, at least one.

    The limit exceeds the median by at least `margin` times the median.
    """
    median = median_low(values)
    mad = median_low([abs(value - median) for value in values])
    return MedianMad(median, mad, median + max(MAX_SIGMAS * MADS_PER_SIGMA * mad, margin * median))
