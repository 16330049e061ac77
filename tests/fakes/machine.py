"""The machine behind the stand-in for CuPy: its devices, their memory, and counts of calls.

There is one at a time, as there is one CUDA in a process: `installed` in `__init__` changes it.
"""

from __future__ import annotations

import bisect
import os
import random
import threading
from collections import Counter, defaultdict, deque
from contextlib import contextmanager

import numpy as np

ALIGN_BYTES = 512  # of all that CUDA hands out
AWAY = 1 << 45  # below a host address: where nothing lies
#: Of the schedule of all lazy machines that have no other; without one work is as late as can be.
SEED = int(os.environ["FAKES_SEED"]) if "FAKES_SEED" in os.environ else None
RECYCLED = "fcV"  #: kinds of dtypes whose rubbish shows; that of whole numbers would be indices


class CUDARuntimeError(RuntimeError):
    """What every call of the runtime raises: a status, and its name in front of the text."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError."""


class ImplicitHostAccess(TypeError):
    """Something would have read device memory without saying so."""


class Block:
    """Memory of a device, which the pool gives out again once nobody holds this."""

    __slots__ = ("__weakref__", "_machine", "address", "bytes", "is_recycled", "kind", "stream")

    def __init__(self, machine: Machine, memory: np.ndarray, kind: str, stream):
        self._machine, self.bytes, self.kind, self.stream = machine, memory, kind, stream
        self.address = memory.__array_interface__["data"][0] - machine.away
        self.is_recycled = False

    def __del__(self):
        self._machine.forget(self.address, self)


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
        races: bool = True,
        seed: int | None = SEED,
    ):
        """`devices` None: no driver. `lazy`: work runs when somebody waits for its stream.

        `peers`: devices reach each other's memory; `ipc`: handles can be had; `ipc_within`: a
        process may open its own, which CUDA refuses, so that threads can stand for processes.
        `driver`: the newest CUDA it knows, 1000 for each; CuPy is built for 13000. `memory_bytes`:
        of each device; `pinned_bytes`: of the host, all together. `hidden`: pointers lead nowhere
        for anybody but the stand-in, so that an MPI that is given one crashes. `races`: accesses to
        memory that nothing orders raise; see races.py. `seed`: of the order in which streams of a
        lazy machine run before they are waited for; None: none does.
        """
        self.devices, self.lazy, self.memory_bytes = devices, lazy, memory_bytes
        self.peers, self.ipc, self.ipc_within, self.name = peers, ipc, ipc_within, name
        self.driver = 0 if devices is None else driver
        self.pinned_bytes, self.away = pinned_bytes, AWAY if hidden else 0
        self.races = _races() if races else None
        self.limits: dict[int, int] = {}  # of devices that have less memory than the others
        self.compute_types: dict[str, int] = {}  # of products, by the letter of their dtype
        self.counts: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.here = threading.local()  # the current device, and streams, of each thread
        self.streams: list = []  # CUDA ends the work of a stream that is gone
        self.nulls: dict[int, object] = {}  # the null stream of each device
        self.regions: dict[int, tuple[int, int]] = {}  # address: (bytes, device)
        self.pinned: dict[int, int] = {}  # address: bytes
        self.unused_pinned: list = []  # pinned memory that nobody uses
        self.random = random.Random(seed) if lazy and seed is not None else None
        self._starts: list[int] = []
        self._blocks: dict[tuple, list[np.ndarray]] = defaultdict(list)  # unused, by their list
        self._gone: deque[tuple] = deque()  # memory that is gone

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
            self.drop_gone()
            bisect.insort(self._starts, address)
            self.regions[address] = (nbytes, device)

    def forget(self, address: int, block: Block | None = None, waits: bool = False) -> None:
        """Take note that memory is gone; without a lock, as finalizers call it anywhere.

        `waits`: once the work on it was done, as cudaFree does.
        """
        epochs = []
        if self.races is not None:
            epochs = [self.races.snapshot()]
            if block is not None and block.stream is not None:
                epochs.append(block.stream.clock.snapshot())
        unused = None if block is None else (self._list_of(block), block.bytes)
        self._gone.append((address, epochs, waits, unused))

    def drop_gone(self) -> None:
        """Drop what is gone; its address may be another's from now on."""
        with self.lock:
            while self._gone:
                address, epochs, waits, unused = self._gone.popleft()
                if self.races is not None:
                    self.races.release(address, epochs, waits)
                if self.regions.pop(address, None) is not None:
                    self._starts.pop(bisect.bisect_left(self._starts, address))
                if unused is not None and unused[0][1] in RECYCLED:
                    self._blocks[unused[0]].append(unused[1])

    @staticmethod
    def _list_of(block: Block) -> tuple:
        return block.stream, block.kind, block.bytes.size

    def region(self, address: int) -> tuple[int, int, int] | None:
        """Return (start, bytes, device) of the device memory in which `address` lies."""
        with self.lock:
            self.drop_gone()
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
        return self.pinned_start(address) is not None

    def pinned_start(self, address: int) -> int | None:
        """Return where the pinned memory begins in which `address` lies; None if in none."""
        for start, nbytes in list(self.pinned.items()):
            if start <= address < start + nbytes:
                return start
        return None

    def used(self, device: int) -> int:
        with self.lock:
            self.drop_gone()
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

    def allocate(self, nbytes: int, kind: str = "u", stream=None) -> Block:
        """Return memory of the current device for work in `stream`, at a multiple of 512.

        It is full of rubbish, or of what was there before, where `kind` of a dtype is recycled.
        """
        self.must_have_devices()
        self.drop_gone()
        self.must_fit(nbytes, self.device)
        size = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        unused = self._blocks[stream, kind, size]
        try:
            memory, is_recycled = unused.pop(), True
        except IndexError:
            raw = np.full(size + ALIGN_BYTES, 0xFF, np.uint8)  # as floats: not-a-number
            skip = -raw.ctypes.data % ALIGN_BYTES
            memory, is_recycled = raw[skip : skip + size], False
        block = Block(self, memory, kind, stream)
        block.is_recycled = is_recycled
        self.here.has_context = True
        self.register(block.address, nbytes, self.device)
        return block

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


def _races():
    from fakes.races import Races  # which asks for the machine

    return Races()


_machine = Machine(devices=None, races=False)


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
