"""Device memory by address: pointers, pinned host memory, copies, and IPC handles."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

import numpy as np

from fakes import races
from fakes.machine import CUDARuntimeError, machine
from fakes.streams import by_pointer, get_current_stream, null_stream

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
HANDLE_BYTES = 64
NO_MEMORY = "cudaErrorMemoryAllocation: out of memory"
_HANDLE = struct.Struct("<qqqq")  # process, descriptor, bytes, device
_held: dict[int, tuple[mmap.mmap, int | None]] = {}  # by address: pages, and their descriptor
_opened: dict[bytes, list[int]] = {}  # by handle: address, how often it was opened


class UnownedMemory:
    """cupy.cuda.UnownedMemory: somebody else's."""

    def __init__(self, ptr, size, owner, device_id=-1):
        if device_id < 0:
            result = machine().region(ptr)
            device_id = result[2] if result else machine().device
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """cupy.cuda.MemoryPointer: a place in memory."""

    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def copy_from_device_async(self, src, size, stream=None):
        memcpyAsync(self.ptr, src.ptr, size, DEVICE_TO_DEVICE, _pointer(stream))

    def copy_from_host_async(self, mem, size, stream=None):
        memcpyAsync(self.ptr, _host_pointer(mem), size, HOST_TO_DEVICE, _pointer(stream))

    def copy_to_host_async(self, mem, size, stream=None):
        memcpyAsync(_host_pointer(mem), self.ptr, size, DEVICE_TO_HOST, _pointer(stream))

    def memset_async(self, value, size, stream=None):
        memsetAsync(self.ptr, value, size, _pointer(stream))


class PinnedMemoryPointer(mmap.mmap):
    """cupy.cuda.PinnedMemoryPointer: host memory, as a buffer and by its address."""

    def __new__(cls, size):
        machine().drop_gone()
        if sum(machine().pinned.values()) + size > machine().pinned_bytes:
            raise CUDARuntimeError(2, NO_MEMORY)
        self = super().__new__(cls, -1, max(size, 1))
        self.ptr = _address_of(self)
        machine().pinned[self.ptr] = max(size, 1)
        self._machine = machine()
        return self

    def __del__(self):  # CuPy's pool keeps it: work that still waits finds it, early or not
        if hasattr(self, "_machine"):
            self._machine.pinned.pop(self.ptr, None)
            self._machine.forget(self.ptr)
            self._machine.unused_pinned.append(self)

    @property
    def mem(self):  # no attribute: memory is to go as soon as nobody holds it
        return self

    def size(self) -> int:  # mmap's word, CuPy's method
        return super().size()


def alloc_pinned_memory(size) -> PinnedMemoryPointer:
    machine().must_have_devices()
    return PinnedMemoryPointer(size)


def hostAlloc(size, flags=0) -> int:
    pages = PinnedMemoryPointer(size)
    _held[pages.ptr] = (pages, None)
    return pages.ptr


def freeHost(ptr) -> None:
    _held.pop(ptr)


def malloc(size) -> int:
    """cudaMalloc: memory that other processes can open."""
    machine().must_have_devices()
    if size > machine().room(machine().device)[0]:
        raise CUDARuntimeError(2, NO_MEMORY)
    descriptor = os.memfd_create("device")
    os.truncate(descriptor, max(size, 1))
    pages = mmap.mmap(descriptor, max(size, 1))
    return _hold(pages, descriptor, file=descriptor)


def free(ptr) -> None:
    """cudaFree: waits for the device first."""
    if not ptr:
        return
    if ptr not in _held:
        raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
    now = machine()
    with now.lock:  # its address may be another's once the pages are gone
        for location in now.streams:
            location.run()
        if _held[ptr][1] is None and now.races is not None:
            now.races.homes.pop(ptr, None)  # a neighbour's, which lives on
        now.forget(ptr, waits=True)
        now.drop_gone()
        _, descriptor = _held.pop(ptr)
    if descriptor is not None:
        os.close(descriptor)


def ipcGetMemHandle(ptr) -> bytes:
    """The handle is of the whole allocation in which `ptr` lies."""
    if not machine().ipc:
        raise CUDARuntimeError(801, "cudaErrorNotSupported: operation not supported")
    result = machine().region(ptr)
    if result is None or result[0] not in _held or _held[result[0]][1] is None:
        raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
    start, nbytes, device = result
    reported = _HANDLE.pack(os.getpid(), _held[start][1], nbytes, device)
    return reported.ljust(HANDLE_BYTES, b"\0")


def ipcOpenMemHandle(handle, flags=1) -> int:
    process, descriptor, nbytes, device = _HANDLE.unpack_from(handle)
    if not machine().ipc:
        raise CUDARuntimeError(801, "cudaErrorNotSupported: operation not supported")
    if process == os.getpid() and not machine().ipc_within:
        raise CUDARuntimeError(201, "cudaErrorDeviceUninitialized: invalid device context")
    with machine().lock:
        if handle not in _opened:
            _opened[handle] = [_open(process, descriptor, nbytes, device), 0]
        _opened[handle][1] += 1
        return _opened[handle][0]


def ipcCloseMemHandle(ptr) -> None:
    with machine().lock:
        handle = next((h for h, (address, _) in _opened.items() if address == ptr), None)
        if handle is None:
            raise CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle")
        _opened[handle][1] -= 1
        if not _opened[handle][1]:
            del _opened[handle]
            free(ptr)


def memcpy(dst, src, size, kind) -> None:
    """cudaMemcpy: done when it returns, behind all work of the null stream."""
    memcpyAsync(dst, src, size, kind, 0)
    null_stream().run()
    races.waited(null_stream())
    machine().count("stream sync")


def memcpyAsync(dst, src, size, kind, stream) -> None:
    _count(dst, src, size, kind)
    location = by_pointer(stream)
    to, source = machine().host(dst), machine().host(src)
    races.note(location, "memcpyAsync", [(src, size)], [(dst, size)])
    location.put(lambda: ctypes.memmove(to, source, size))
    host = {HOST_TO_DEVICE: src, DEVICE_TO_HOST: dst}.get(kind)
    if host is not None and not machine().is_pinned(host):
        machine().count("pageable")
        location.run()
        races.waited(location)


def memcpyPeerAsync(dst, dst_device, src, src_device, size, stream) -> None:
    memcpyAsync(dst, src, size, DEVICE_TO_DEVICE, stream)


def memset(ptr, value, size) -> None:
    memsetAsync(ptr, value, size, 0)


def memsetAsync(ptr, value, size, stream) -> None:
    _must_be_device(ptr)
    address = machine().host(ptr)
    races.note(by_pointer(stream), "memsetAsync", (), [(ptr, size)])
    by_pointer(stream).put(lambda: ctypes.memset(address, value, size))


def pageable_or_pinned(x: np.ndarray) -> bool:
    """Return whether the host array is pinned; count it if not."""
    pinned = machine().is_pinned(x.__array_interface__["data"][0])
    if not pinned:
        machine().count("pageable")
    return pinned


def _count(dst, src, size, kind) -> None:
    """Count a copy by its kind; refuse a kind that the memory is not of."""
    observed = (machine().region(src) is not None, machine().region(dst) is not None)
    kinds = {(False, True): 1, (True, False): 2, (True, True): 3, (False, False): 0}
    if kind not in (kinds[observed], DEFAULT):
        raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")
    machine().count(("H2H", "H2D", "D2H", "D2D")[kinds[observed]], size)


def _must_be_device(ptr) -> None:
    if machine().region(ptr) is None:
        raise CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument")


def _open(process, descriptor, nbytes, device) -> int:
    try:
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        raise CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: handle is gone") from None
    try:
        return _hold(mmap.mmap(own, max(nbytes, 1)), None, nbytes, device, own)
    finally:
        os.close(own)


def _hold(pages, descriptor, nbytes=None, device=None, file=None) -> int:
    address = _address_of(pages) - machine().away
    _held[address] = (pages, descriptor)
    if machine().races is not None:  # what several ranks map is one memory
        machine().races.homes[address] = ("file", os.fstat(file).st_ino)
    local = machine().device if device is None else device
    machine().register(address, len(pages) if nbytes is None else nbytes, local)
    return address


def _address_of(pages: mmap.mmap) -> int:
    return np.frombuffer(pages, np.uint8).ctypes.data


def _host_pointer(mem) -> int:
    return mem.value if isinstance(mem, ctypes.c_void_p) else int(mem)


def _pointer(stream) -> int:
    return (stream or get_current_stream()).ptr
