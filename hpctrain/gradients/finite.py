"""Check that every gradient and its sum over ranks are finite, before any update.

    backward         writes slot 3      slot 2      slot 1      slot 0
    check            g . g of slot 3    of slot 2   of slot 1   of slot 0     passes()     vote
    wire                                | slots 3, 2 ..........  | slots 1, 0 ..........

Each rank checks its own gradient, slot by slot, while the slot is in the cache and before a sum
overwrites it. The result is part of the vote that all ranks exchange in each step, so that no rank
changes a parameter before all ranks know the result.

Where all ranks hold the sum anyway, each rank checks 1/P of the sum instead, and the vote follows
the reduction (engines/synchronous/finite_vote.py). A second read of every gradient before the
neighbours read it costs 8 to 15 % of a step where cores share no cache: the neighbours then fetch
these lines more slowly from the core that wrote them.

One product suffices for nearly all gradients: if g . g is finite, every element is below 1.9e19 in
float32, and no sum over ranks overflows. If it is not, the elements are checked one by one: each
must be at most M / 2P, where M is the largest number of the dtype and P the number of ranks whose
gradients are added (for one rank, at most M). A gradient between these bounds and M is finite, but
counts as too large. Each element of a sum must be at most M / 2: if an element is larger, the
gradient of some rank is beyond M / 2P, and the error names that rank.

Where nothing is sent during backward, a plane that fits the cache is checked by one product after
it, and slot by slot only if that is not finite.

On a GPU one kernel per bucket, or one per gradient if no bucket is sent during backward, stores the
index of the first invalid element; one number is copied to the host. Cost: n elements are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import numpy as np

from hpctrain.core.kernels import launch, written
from hpctrain.core.xp import Array, fetch, namespace, on_device
from hpctrain.gradients.replica import Replica, ignore_ready
from hpctrain.nn import Sums

#: Writes twice the index of the first invalid element, plus one if this element is finite.
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
NO_FAULT = np.iinfo(np.uint64).max
MAX_PLANE_BYTES = 1 << 20  #: of a gradient that is still in the second-level cache after backward
#: Returns the gradients in a range of the plane: one array, or one per block of samples.
GradientParts = Callable[[slice], Sequence[Array]]


class GradientCheck:
    """Checks a rank's gradients, and counts dropped gradients."""

    def __init__(self, replica: Replica, ranks: int, parts: GradientParts | None = None):
        """Check the gradients of `replica`, which are summed over `ranks`.

        `parts` returns their arrays; the default is the gradient plane of the arena.
        """
        arena = replica.arena
        self.fault = ""  #: the fault of the last gradient; empty if it is valid
        self.dropped = 0  #: number of gradients of this rank that were not applied
        self._replica, self._ranks = replica, ranks
        self._parts = parts or (lambda elements: (replica.arena.grad[elements],))
        limit = float(np.finfo(arena.grad.dtype).max) / (2 * ranks if ranks > 1 else 1)
        self._limit, self._limit_of_sums = map(arena.grad.dtype.type, (limit, limit * ranks))
        self._slots = {slot.name: slice(slot.offset, slot.stop) for slot in arena.slots}
        self._is_small = arena.grad.nbytes <= MAX_PLANE_BYTES
        self._unchecked_slots: set[str] = set()
        self.buffers_may_differ = False  #: between ranks: gradients have been computed since
        self.has_own_steps = False  #: whether this rank applies or drops its gradients alone
        self._drops_in_a_row = 0
        self._saved_statistics = arena.buffer.copy()
        self._first_fault: Array | None = None  # on a device
        self._has_checked_buckets = False
        if on_device(arena.grad):
            self._first_fault = namespace(arena.grad).full(1, NO_FAULT, np.uint64)

    def begin(
        self, on_ready: Callable[[str], None], check_slots: bool = True
    ) -> Callable[[str], None]:
        """Begin a gradient; return an `on_ready` that checks each slot, then calls `on_ready`.

        Without `check_slots` the gradient is not checked: the caller checks the sum, on the host.
        """
        self.fault, self._has_checked_buckets, self._unchecked_slots = "", False, set()
        self.buffers_may_differ = True
        if self._saved_statistics.size:
            self._saved_statistics[...] = self._replica.arena.buffer
        if self._first_fault is not None or not check_slots:
            return on_ready
        self._unchecked_slots = set(self._slots)
        if on_ready is ignore_ready and self._is_small:
            return on_ready

        def check_slot(name: str) -> None:
            self._check_slot(name)
            on_ready(name)

        return check_slot

    def on_bucket(self, start: int, stop: int) -> None:
        """Check a bucket that is sent from a device during backward."""
        if self._first_fault is not None:
            self._has_checked_buckets = True
            self._launch_kernel(slice(start, stop))

    def passes(self, sums: Sums) -> bool:
        """Return whether loss and gradient are valid; if not, restore the running statistics.

        On a device this waits until backward is complete.
        """
        if self._first_fault is not None:
            if not self._has_checked_buckets:
                self._launch_kernel(slice(0, self._replica.arena.grad.size))
            index, is_finite = divmod(int(fetch(self._first_fault)()[0]), 2)
            if 2 * index + is_finite != NO_FAULT:
                self._first_fault[...] = NO_FAULT
                slot_names = (name for name, s in self._slots.items() if s.start <= index < s.stop)
                self._set_fault(next(slot_names, "?"), bool(is_finite))
        else:
            self._check_remaining_slots()
        if not isfinite(sums["loss"].sum):
            self.fault = "the loss is not finite"
        if self.fault:
            self.undo()
        return not self.fault

    @np.errstate(over="ignore")
    def sum_passes(self, total: np.ndarray) -> bool:
        """Return whether `total`, a part of the sum over all ranks, is valid."""
        return isfinite(total.dot(total)) or bool((abs(total) <= self._limit_of_sums).all())

    def undo(self) -> None:
        """Restore the running statistics to their values before the gradient."""
        if self._saved_statistics.size:
            self._replica.arena.buffer[...] = self._saved_statistics

    def may_continue(self, is_applied: bool, limit: int, count: int = 1) -> bool:
        """Return whether a worker that steps independently of others may continue.

        A gradient that is not applied counts as `count` dropped gradients. The worker must stop
        after more than `limit` drops in a row.
        """
        self.has_own_steps = True
        self._drops_in_a_row = 0 if is_applied else self._drops_in_a_row + 1
        if self._drops_in_a_row > limit:
            return False
        self.dropped += 0 if is_applied else count
        return True

    @np.errstate(over="ignore")
    def _check_remaining_slots(self) -> None:
        """Check the slots that were not checked during backward, on the host."""
        if len(self._unchecked_slots) == len(self._slots):
            plane = self._parts(slice(0, self._replica.arena.grad.size))
            if all(isfinite(x.dot(x)) for x in plane):
                return
        for name in tuple(self._unchecked_slots):
            self._check_slot(name)

    @np.errstate(over="ignore")
    def _check_slot(self, name: str) -> None:
        """Check slot `name`, on the host."""
        self._unchecked_slots.discard(name)
        for x in self._parts(self._slots[name]):
            # x . x is one pass over x in the cache; elements are checked only if it is not finite.
            if not isfinite(x.dot(x)) and not (abs(x) <= self._limit).all():
                self._set_fault(name, bool(np.isfinite(x).all()))

    def _launch_kernel(self, elements: slice) -> None:
        for x in self._parts(elements):
            if x.size:
                source = written(SOURCE, x.dtype.name)
                offset = np.uint64(elements.start)
                args = (x, np.int64(x.size), self._limit, offset, self._first_fault)
                launch(x, source, "first_not_finite", x.size, args)

    def _set_fault(self, name: str, is_finite: bool) -> None:
        too_large_text = f"too large for a sum over {self._ranks} ranks"
        self.fault = f"the gradient of '{name}' is {too_large_text if is_finite else 'not finite'}"
