"""The result of a check: its verdict, a remedy, and the nodes to blame; outliers among values.

Outliers among many values are found by median and MAD, which a few extreme values hardly change.

    seconds  1.0  1.0  1.1  1.1  9.0        median 1.1, MAD 0.1; 9.0 lies beyond 1.65

The limit is the median plus 5 standard deviations, estimated as 1.4826 MAD. It is at least 1.5
times the median, since smaller differences cost a run little. Lower medians are used, so that even
the larger of two values can be an outlier, and up to half of the values may be slow.

Source: Leys et al., "Detecting outliers: do not use standard deviation around the mean, use
absolute deviation around the median", 2013.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from hpctrain.core.names import fold_names

Verdict = Literal["ok", "note", "slow", "bad"]
VERDICTS: tuple[Verdict, ...] = ("ok", "note", "slow", "bad")  #: from best to worst
MAX_SIGMAS, MADS_PER_SIGMA = 5, 1.4826  # standard deviation of a normal distribution in MADs
MIN_RELATIVE_MARGIN = 0.5  # of the median


@dataclass(frozen=True)
class Check:
    """Result of a check: "bad" breaks runs, "slow" costs time, a "note" is information."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""
    nodes: tuple[str, ...] = ()  #: the nodes to blame, which a run should leave out


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 if a check is "bad", else 0."""
    return int(any(check.verdict == "bad" for check in checks))


def node_list(hosts: Iterable[str]) -> str:
    """Return `hosts` as one word for srun's --exclude and --nodelist."""
    return ",".join(fold_names(hosts))


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
