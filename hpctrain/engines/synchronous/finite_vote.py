"""The ranks vote on each step: no rank changes a parameter if any gradient is not finite.

    GradientVote      | backward, check | vote | sums          | update |
    CompressedVote    | backward, check | vote | sums, check   | update |
    SumVote           | backward        |        sums, check   | vote   | update |

The checks are described in gradients/finite.py. All ranks hold the same compressed sums, so that
they need no second vote. Without compression each rank checks a range of the sums instead of its
own gradient, which costs less; after a failure all ranks compute their gradients once more, to name
the rank whose gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.collectives import Group
from hpctrain.collectives.vote import elementwise_maximum
from hpctrain.engines.engine import Flags, Task
from hpctrain.gradients.compress import Compressor
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums


class GradientVote:
    """Each rank checks its own gradient; the vote precedes the sums."""

    def __init__(self, replica: Replica, check: GradientCheck, group: Group):
        """Prepare the votes of `group`, which allocates their buffers; collective."""
        self._replica, self._check, self._group = replica, check, group
        self.join(Flags())

    def join(self, flags: Flags) -> Flags:
        """Return the maxima of the flags over the ranks; collective."""
        return Flags(*elementwise_maximum(self._group, flags))

    def begin(self, on_ready: Callable[[str], None]) -> Callable[[str], None]:
        """Begin a gradient; return an `on_ready` that checks each slot, then calls `on_ready`."""
        return self._check.begin(on_ready)

    def compute_gradient(
        self, task: Task, on_ready: Callable[[str], None], flags: Flags
    ) -> tuple[Sums, Flags]:
        """Compute a gradient; return its sums, and `flags` with its failure, if it has failed."""
        sums = self._replica.gradient(*task, on_ready)
        passes = self._check.passes(sums)
        return sums, flags if passes else flags.with_failure(self._group.link.rank)

    def before_sums(self, flags: Flags) -> Flags:
        """Return the joint flags, as far as they are known before the sums."""
        return self.join(flags)

    def after_sums(self, gradient: np.ndarray, flags: Flags) -> Flags:
        """Return the flags of all ranks for the sums in `gradient`."""
        return flags

    def name_failing_rank(self, task: Task, flags: Flags) -> Flags:
        """Return `flags` of a failed step with the rank whose gradient is not finite."""
        return flags


class CompressedVote(GradientVote):
    """Each rank checks its own gradient, and the sums that all ranks hold."""

    def __init__(
        self, replica: Replica, check: GradientCheck, group: Group, compressor: Compressor
    ):
        super().__init__(replica, check, group)
        self._compressor = compressor

    def after_sums(self, gradient: np.ndarray, flags: Flags) -> Flags:
        """Return `flags`, with a failure if a compressed sum of finite gradients is not finite."""
        if self._compressor.sums_are_finite() or flags.failed:
            return flags
        method = f"[wire] compression = '{self._compressor.__name__}'"
        self._check.fault = f"the sum of gradients, with {method}, is not finite"
        return flags.with_failure(self._group.link.size)


class SumVote(GradientVote):
    """Each rank checks a range of the sums; the vote follows them."""

    def __init__(self, replica: Replica, check: GradientCheck, group: Group, own: slice):
        """Check range `own` of the sums on this rank."""
        super().__init__(replica, check, group)
        self._own = own

    def begin(self, on_ready: Callable[[str], None]) -> Callable[[str], None]:
        """Begin a gradient that is not checked; return `on_ready`."""
        return self._check.begin(on_ready, check_slots=False)

    def before_sums(self, flags: Flags) -> Flags:
        """Return `flags` of this rank."""
        return flags

    def after_sums(self, gradient: np.ndarray, flags: Flags) -> Flags:
        """Return the flags of all ranks for the sums in `gradient`."""
        passes = self._check.sum_passes(gradient[self._own])
        return self.join(flags if passes else flags.with_failure(self._group.link.rank))

    def name_failing_rank(self, task: Task, flags: Flags) -> Flags:
        """Return `flags` with the rank whose own gradient makes the sum not finite; collective.

        The sum was written over the gradients, so all ranks compute theirs once more.
        """
        task = task._replace(key=task.key._replace(recomputed=True))
        on_ready = self._check.begin(ignore_ready)
        _, own_flags = self.compute_gradient(task, on_ready, flags._replace(failed=0))
        own_flags = self.join(own_flags)
        self._check.undo()
        if own_flags.failed:
            return own_flags
        self._check.fault = "the sum of gradients is not finite"  # of a gradient with random state
        return flags.with_failure(self._group.link.size)
