"""The time of a training step: buckets reduced during backward, on every rank's clock.

    main thread           forward | backward ..... bucket 0 full .. 1 full .. 2 full |wait| update
    communication thread                           [ bucket 0 .......... ][ 1 ......][ 2 ]
                                                                              exposed |----|

One thread per rank communicates, in one order, as in gradients/reducer.py: bucket i starts on a
rank when it is full there and bucket i - 1 has finished there. The thread takes no time from the
main thread: ranks have a core, or a device, to spare. Without overlap all buckets start when the
last one is full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.tuning.model.loggp import Array, Clocks
from hpctrain.tuning.model.message_schedules import Schedule


@dataclass(frozen=True)
class Step:
    """One rank's computation and communication in a step: seconds and bytes per bucket."""

    full_times: tuple[float, ...]  #: times of full buckets, from the step's begin; the last ends it
    buckets: tuple[float, ...]  #: bytes, in the order in which buckets leave
    update: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of a step without communication."""
        return self.full_times[-1] + self.update

    def split_over(self, ranks: int) -> Step:
        """Return the step of a rank with 1/ranks of the samples: strong scaling."""
        return Step(tuple(time / ranks for time in self.full_times), self.buckets, self.update)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: total; mean in collectives; beyond the slowest rank's computation."""

    step: float
    wire: float
    exposed: float


def uniform_step(compute: float, nbytes: float, bucket_bytes: float) -> Step:
    """Return the step of a model of equal layers: a third is forward, the rest backward.

    Backward has two matrix products per layer, forward one. The update takes no time.
    """
    count = max(1, round(nbytes / bucket_bytes))
    full_times = compute * (1 / 3 + 2 / 3 * np.arange(1, count + 1) / count)
    return Step(tuple(full_times.tolist()), (nbytes / count,) * count)


def step_time(step: Step, schedule: Schedule, clocks: Clocks, overlap: bool = True) -> StepTime:
    """Return the time of `step` on the ranks of `clocks`, which begin it at their time."""
    begin = clocks.now.copy()
    full_clocks = [begin + clocks.slow_factors * seconds for seconds in step.full_times]
    wire = 0.0
    for full_time, nbytes in zip(
        full_clocks if overlap else full_clocks[-1:] * len(full_clocks), step.buckets, strict=True
    ):
        clocks.now = np.maximum(clocks.now, full_time)
        start = clocks.now.copy()
        schedule(clocks, nbytes)
        wire += float(np.mean(clocks.now - start))
    clocks.now = np.maximum(clocks.now, full_clocks[-1]) + clocks.slow_factors * step.update
    compute_end = begin + clocks.slow_factors * step.compute
    return StepTime(_lateness(clocks.now, begin), wire, _lateness(clocks.now, compute_end))


def _lateness(end: Array, begin: Array) -> float:
    return float(end.max() - begin.max())
