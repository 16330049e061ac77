"""The ranks vote on each step: no rank changes a parameter if any gradient is not finite.

    GradientVote, exact sums        | backward, check | vote | sums          | update |
    GradientVote, compressed sums   | backward, check | vote | sums, check   | update |
    SumVote                         | backward        |        sums, check   | vote   | update |

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
from hpctrain.core.xp import on_device
from hpctrain.engines.engine import Flags, Task
from hpctrain.engines.synchronous.gradient_sums import FastSums
from hpctrain.gradients.finite import GradientCheck
from hpctrain.gradients.replica import ignore_ready
from hpctrain.nn import Sums


class GradientVote:
    """Each rank checks its own gradient; the vote precedes the sums."""

    def __init__(self, sums: FastSums, check: GradientCheck, group: Group):
        """Prepare the votes of `group`, which allocates their buffers; collective."""
        self._sums, self._check, self._group = sums, check, group
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
        sums = self._sums.replica.gradient(*task, on_ready)
        passes = self._check.passes(sums)
        return sums, flags if passes else flags.with_failure(self._group.link.rank)

    def before_sums(self, flags: Flags) -> Flags:
        """Return the joint flags, as far as they are known before the sums."""
        return self.join(flags)

    def after_sums(self, gradient: np.ndarray, flags: Flags) -> Flags:
        """Return `flags`, with a failure if the sum of finite gradients is not finite."""
        fault = self._sums.fault()
        if not fault or flags.failed:
            return flags
        self._check.fault = fault
        return flags.with_failure(self._group.link.size)

    def name_failing_rank(self, task: Task, flags: Flags) -> Flags:
        """Return `flags` of a failed step with the rank whose gradient is not finite."""
        return flags


class SumVote(GradientVote):
    """Each rank checks a range of the sums; the vote follows them."""

    def __init__(self, sums: FastSums, check: GradientCheck, group: Group, own: slice):
        """Check range `own` of the sums on this rank."""
        super().__init__(sums, check, group)
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


def make_vote(
    sums: FastSums, check: GradientCheck, group: Group, own: slice | None
) -> GradientVote:
    """Return the vote on each step: on sums, if all ranks wait for exact ones on the host.

    `own`: range of the sums that this rank checks; None: ranks do not wait for sums. Collective.
    """
    if own is None or not sums.is_exact or on_device(sums.replica.arena.grad):
        return GradientVote(sums, check, group)
    return SumVote(sums, check, group, own)
