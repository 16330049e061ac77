"""The machine behind the stand-in for CuPy: its devices, their memory, and counts of calls.

There is one at a time, as there is one CUDA in a process: `installed` in `__init__` changes it.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections import Counter
from contextlib import contextmanager

import numpy as np

ALIGN_BYTES = 512  # of all that CUDA hands out
AWAY = 1 << 45  # below a host address: where nothing lies


class CUDARuntimeError(RuntimeError):
    """What every call of the runtime raises: a status, and its name in front of the text."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class ImplicitHostAccess(TypeError):
    """Something would have read device memory without saying so."""


class Machine:
    """Devices and counters; what a test asks for and looks at.

    `counts` has "H2D", "D2H", "D2D" (copies, "H2D bytes" and so on beside them), "stream sync",
    "event sync", "device sync", "implicit" (host access that was refused), "pageable" (copies by
    memcpyAsync that had to wait because host memory was not pinned) and "fused" (calls).
    """

    def __init__(
        self,
        devices: int | None = 1,
        lazy: bool = False,
        memory_bytes: int = 1 << 33,
        peers: bool = True,
        ipc: bool = True,
        ipc_within: bool = False,
        name: str = "Stand-in",
        driver: int = 13000,
        pinned_bytes: int = 1 << 40,
        hidden: bool = False,
    ):
        """`devices` None: no driver. `lazy`: work runs when somebody waits for its stream.

        `peers`: devices reach each other's memory; `ipc`: handles can be had; `ipc_within`: a
        process may open its own, which CUDA refuses, so that threads can stand for processes.
        `driver`: the newest CUDA it knows, 1000 for each; CuPy is built for 13000. `memory_bytes`:
        of each device; `pinned_bytes`: of the host, all together. `hidden`: pointers lead nowhere
        for anybody but the stand-in, so that an MPI that is given one crashes.
        """
        self.devices, self.lazy, self.memory_bytes = devices, lazy, memory_bytes
        self.peers, self.ipc, self.ipc_within, self.name = peers, ipc, ipc_within, name
        self.driver = 0 if devices is None else driver
        self.pinned_bytes, self.away = pinned_bytes, AWAY if hidden else 0
        self.limits: dict[int, int] = {}  # of devices that have less memory than the others
        self.compute_types: dict[str, int] = {}  # of products, by the letter of their dtype
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.here = threading.local()  # the current device, and streams, of each thread
        self.streams: list = []  # CUDA ends the work of a stream that is gone
        self.nulls: dict[int, object] = {}  # the null stream of each device
        self.regions: dict[int, tuple[int, int]] = {}  # address: (bytes, device)
        self.pinned: dict[int, int] = {}  # address: bytes
        self._starts: list[int] = []

    @property
    def device(self) -> int:
        """The current device of this thread: 0 until it says otherwise."""
        return getattr(self.here, "device", 0)

    def count(self, kind: str, nbytes: int | None = None) -> None:
        with self.lock:
            self.counts[kind] += 1
            if nbytes is not None:
                self.counts[f"{kind} bytes"] += nbytes

    def register(self, address: int, nbytes: int, device: int) -> None:
        """Take note of device memory."""
        with self.lock:
            bisect.insort(self._starts, address)
            self.regions[address] = (nbytes, device)

    def forget(self, address: int) -> None:
        with self.lock:
            if self.regions.pop(address, None) is not None:
                self._starts.pop(bisect.bisect_left(self._starts, address))

    def region(self, address: int) -> tuple[int, int, int] | None:
        """Return (start, bytes, device) of the device memory in which `address` lies."""
        with self.lock:
            i = bisect.bisect_right(self._starts, address) - 1
            if i < 0:
                return None
            start = self._starts[i]
            nbytes, device = self.regions[start]
            return (start, nbytes, device) if address < start + max(nbytes, 1) else None

    def host(self, address: int) -> int:
        """Return where the host finds what lies at `address`, of the host or of a device."""
        return address if self.region(address) is None else address + self.away

    def is_pinned(self, address: int) -> bool:
        return any(start <= address < start + n for start, n in list(self.pinned.items()))

    def used(self, device: int) -> int:
        with self.lock:
            return sum(n for n, d in list(self.regions.values()) if d == device)  # threads allocate

    def room(self, device: int) -> tuple[int, int]:
        """Return the bytes that are free on a device, and all that it has."""
        complete = self.limits.get(device, self.memory_bytes)
        return max(complete - self.used(device), 0), complete

    def must_fit(self, nbytes: int, device: int) -> None:
        """Raise what CuPy's pool raises where a device has no room for `nbytes`."""
        if nbytes > self.room(device)[0]:
            raise OutOfMemoryError(
                f"Out of memory allocating {nbytes:,} bytes (allocated so far: "
                f"{self.used(device):,} bytes)."
            )

    def allocate(self, nbytes: int) -> np.ndarray:
        """Return uint8 memory of the current device, at a multiple of 512, full of rubbish."""
        self.must_have_devices()
        self.must_fit(nbytes, self.device)
        raw = np.full(nbytes + ALIGN_BYTES, 0xFF, np.uint8)  # as floats: not-a-number
        skip = -raw.ctypes.data % ALIGN_BYTES
        self.own(raw)
        return raw[skip : skip + nbytes]

    def own(self, x: np.ndarray) -> None:
        """Take the memory of `x`, which owns it, for that of the current device while it lives."""
        address = x.ctypes.data - self.away
        self.register(address, x.nbytes, self.device)
        weakref.finalize(x, self.forget, address)

    def must_have_devices(self) -> None:
        if self.driver < 13000:
            raise CUDARuntimeError(
                35,
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA "
                "runtime version",
            )
        if not self.devices:
            raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")

    def must_be_on_current_device(self, device: int) -> None:
        """Raise unless work on the current device may touch memory of `device`."""
        if device != self.device and not self.peers:
            raise ValueError(
                f"Array device must be same as the current device: array device = {device} "
                f"while current = {self.device}"
            )


_machine = Machine(devices=None)


def machine() -> Machine:
    """Return the machine that stands for now."""
    return _machine


@contextmanager
def replaced(by: Machine):
    """Let `by` stand until the end of the block."""
    global _machine
    before, _machine = _machine, by
    try:
        yield by
    finally:
        _machine = before
