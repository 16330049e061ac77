"""What every algorithm is given: the link to the ranks that take part, and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpctrain.transport.link import Link


class Scratch:
    """Memory that is kept from call to call, so that no step of training allocates."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def like(self, x: np.ndarray) -> np.ndarray:
        """Return an array of `x`'s length and dtype; the next call hands out the same memory."""
        if self._memory.nbytes < x.nbytes:
            self._memory = np.empty(x.nbytes, np.uint8)
        return self._memory[: x.nbytes].view(x.dtype)


@dataclass(frozen=True)
class Group:
    """Ranks that reduce together; built once, used by one thread."""

    link: Link
    scratch: Scratch = field(default_factory=Scratch)
