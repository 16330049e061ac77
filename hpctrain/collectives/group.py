"""What every algorithm is given: the link to the ranks that take part, and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpctrain.transport.link import Link


class Scratch:
    """Memory that is kept from call to call, so that no step of training allocates."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, length: int, dtype: np.dtype) -> np.ndarray:
        """Return an array of `length` elements; the next call hands out the same memory."""
        nbytes = length * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype)

    def like(self, x: np.ndarray) -> np.ndarray:
        """Return an array of `x`'s length and dtype; the next call hands out the same memory."""
        return self.take(x.size, x.dtype)

    def slots(self, x: np.ndarray, count: int, slot_bytes: int) -> np.ndarray:
        """Return an array (count, n) of `x`'s dtype, n as long as a segment of `x` can be."""
        length = min(x.size, max(1, slot_bytes // x.itemsize))
        return self.take(count * length, x.dtype).reshape(count, length)


@dataclass(frozen=True)
class Group:
    """Ranks that reduce together; built once, used by one thread."""

    link: Link
    scratch: Scratch = field(default_factory=Scratch)
