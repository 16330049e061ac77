"""The check of every gradient: it is finite, and so is its sum over ranks, before any update.

    backward         writes slot 3      slot 2      slot 1      slot 0
    check            g . g of slot 3    of slot 2   of slot 1   of slot 0     passes()     vote
    wire                                | slots 3, 2 ..........  | slots 1, 0 ..........

Each rank checks its own gradient, slot by slot, while the slot is in the cache and before a sum
is written over it. The result rides on the vote that all ranks exchange in each step, so that no
rank changes a parameter before all ranks know the result.

Where all ranks hold the sum anyway, each checks its P-th part of that instead, and the vote comes
after the reduction (engines/synchronous/allreduce.py). To read every gradient once more before its
neighbours read it is 8 to 15 % of a step where cores share no cache: lines that were read again are
slower to fetch from the core that wrote them.

One product does for nearly all gradients: where g . g is finite, every element is below 1.9e19 in
float32, and no sum over ranks overflows either. Where it is not, the elements are checked one by
one: each must be at most M / 2P, M being the largest number of the dtype and P the number of ranks
whose gradients are added; alone, at most M. A gradient between these bounds and M is finite, but
counts as too large. Of a sum each element must be at most M / 2: where it is not, some rank's own
is beyond M / 2P, and that rank is named.

On a GPU one kernel per bucket, or per gradient where nothing travels during backward, keeps the
place of the first element that does not pass; a number comes to the host. Cost: n elements are
read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from hpctrain.core.kernels import launch, written
from hpctrain.core.xp import Array, fetch, namespace, on_device
from hpctrain.gradients.replica import Replica
from hpctrain.nn import Sums

#: Two times the place of the first element that does not pass, and one more where it is finite.
SOURCE = """
extern "C" __global__
void first_not_finite(const T* x, long long n, REAL limit, unsigned long long start,
                      unsigned long long* first) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n;
         i += (long long)gridDim.x * blockDim.x)
        if (!(fabs(x[i]) <= limit))
            atomicMin(first, 2 * (start + i) + (x[i] - x[i] == 0));
}
"""
NONE = np.iinfo(np.uint64).max
#: Returns the summands of elements `at` of the plane: one array, or one per block of samples.
Parts = Callable[[slice], Sequence[Array]]


class GradientCheck:
    """Checks the gradients of one rank, and counts those that it drops."""

    def __init__(self, replica: Replica, ranks: int, parts: Parts | None = None):
        """Check gradients of `replica`, of which `ranks` are added.

        `parts` returns their arrays, if not in the arena's plane alone.
        """
        arena = replica.arena
        self.fault = ""  #: the fault of the gradient that was checked last
        self.dropped = 0  #: gradients of this rank that were not applied
        self._replica, self._ranks, self._parts = replica, ranks, parts or self._plane
        limit = float(np.finfo(arena.grad.dtype).max) / (2 * ranks if ranks > 1 else 1)
        self._limit, self._limit_of_sums = map(arena.grad.dtype.type, (limit, limit * ranks))
        self._slots = {slot.name: slice(slot.offset, slot.stop) for slot in arena.slots}
        self._left: set[str] = set()  # slots that are not checked yet
        self.own_steps = False  #: whether this rank applies or drops its gradients alone
        self._in_a_row = 0
        self._statistics = arena.buffer.copy()
        self._first: Array | None = None  # on a device
        self._early = False
        if on_device(arena.grad):
            self._first = namespace(arena.grad).full(1, NONE, np.uint64)

    def begin(self, on_ready: Callable[[str], None], own: bool = True) -> Callable[[str], None]:
        """Return the function for a replica to call instead of `on_ready` during a gradient.

        Without `own` its gradient is not checked: the caller checks the sum, on the host.
        """
        self.fault, self._early, self._left = "", False, set()
        if self._statistics.size:
            self._statistics[...] = self._replica.arena.buffer
        if self._first is not None or not own:
            return on_ready
        self._left = set(self._slots)

        def ready(name: str) -> None:
            self._look(name)
            on_ready(name)

        return ready

    def bucket(self, start: int, stop: int) -> None:
        """Check elements that leave a device while backward goes on."""
        if self._first is not None:
            self._early = True
            self._launch(slice(start, stop))

    def passes(self, sums: Sums) -> bool:
        """Return whether loss and gradient can be applied; if not, undo the running statistics.

        On a device it waits until backward is done.
        """
        if self._first is not None:
            self._look_on_device(self._first)
        else:
            for name in tuple(self._left):
                self._look(name)
        if not isfinite(sums.loss):
            self.fault = "the loss is not finite"
        if self.fault:
            self.undo()
        return not self.fault

    @np.errstate(over="ignore")
    def sum_passes(self, total: np.ndarray) -> bool:
        """Return whether `total`, a part of the sum over all ranks, can be applied."""
        return isfinite(total.dot(total)) or bool((abs(total) <= self._limit_of_sums).all())

    def undo(self) -> None:
        """Restore the running statistics from before the gradient."""
        if self._statistics.size:
            self._replica.arena.buffer[...] = self._statistics

    def goes_on(self, fine: bool, limit: int, count: int = 1) -> bool:
        """Return whether a worker with steps of its own goes on, with the gradient or without it.

        `fine`: it is applied. Else it is dropped, `count` gradients with it, but no more than
        `limit` times in a row.
        """
        self.own_steps = True
        self._in_a_row = 0 if fine else self._in_a_row + 1
        if self._in_a_row > limit:
            return False
        self.dropped += 0 if fine else count
        return True

    @np.errstate(over="ignore")
    def _look(self, name: str) -> None:
        """Check slot `name`, on the host."""
        self._left.discard(name)
        for x in self._parts(self._slots[name]):
            # The product of x with itself is one pass at the speed of the cache.
            if not isfinite(x.dot(x)) and not (abs(x) <= self._limit).all():
                self._note(name, bool(np.isfinite(x).all()))

    def _look_on_device(self, first: Array) -> None:
        if not self._early:
            self._launch(slice(0, self._replica.arena.grad.size))
        place, finite = divmod(int(fetch(first)()[0]), 2)
        if 2 * place + finite != NONE:
            first[...] = NONE
            inside = (name for name, at in self._slots.items() if at.start <= place < at.stop)
            self._note(next(inside, "?"), bool(finite))

    def _launch(self, at: slice) -> None:
        for x in self._parts(at):
            if x.size:
                source = written(SOURCE, x.dtype.name)
                args = (x, np.int64(x.size), self._limit, np.uint64(at.start), self._first)
                launch(x, source, "first_not_finite", x.size, args)

    def _note(self, name: str, finite: bool) -> None:
        large = f"too large for a sum over {self._ranks} ranks"
        self.fault = f"the gradient of '{name}' is {large if finite else 'not finite'}"

    def _plane(self, at: slice) -> tuple[Array]:
        return (self._replica.arena.grad[at],)
