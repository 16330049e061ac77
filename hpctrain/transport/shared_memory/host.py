"""Memory shared by the ranks of a node: each rank's own pages, mapped by every rank.

    rank 0   [own pages] <---- maps ---- ranks 1, 2, ...
    rank 1   [own pages] <---- maps ---- ranks 0, 2, ...

Where the kernel allows it the pages have no name (memfd_create; a neighbour opens /proc/PID/fd/N):
a killed job leaves nothing behind, and they outlive a killed neighbour. Else they are a file in
/dev/shm that is unlinked once all have mapped it; else a window of MPI's; else there is no shared
memory, and messages replace it. All ranks of a node use the same kind.

A rank may read what another wrote only after a barrier or a message: nothing here orders memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing

from hpctrain.core.opening import NAMED, open_file
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.transport.link import Link

if TYPE_CHECKING:
    from hpctrain.transport.shared_memory.cuda_ipc import SharedGpuMemory

Gather = Callable[[bytes], list[bytes]]  #: from this rank's bytes to every rank's

#: Neighbours' arrays begin at different places of their pages: a load that agrees with an earlier
#: store in the last 12 bits of its address would have to wait for it ("4 KiB aliasing").
SKEW_BYTES, PAGE_BYTES = 1088, 4096
ALIGN_BYTES = 64  # a cache line; the first holds the token
SHM_FOLDER = "/dev/shm"
_LAYOUT = struct.Struct("<qq")  # bytes before the array, bytes of the array


class SharedFile(NamedTuple):
    """A file of this rank's pages, and the path by which neighbours open it."""

    descriptor: int
    path: str


class Region(NamedTuple):
    """One allocation: its number, its bytes, and all ranks' arrays (uint8), None for our own."""

    number: int
    nbytes: int
    arrays: list[np.ndarray | None]


class SharedArrays(NamedTuple):
    """The place of an array: its allocation, its offset in bytes, and the arrays of all ranks.

    One operation may use the arrays of several ranks if their number and offset agree.
    """

    number: int
    offset: int
    arrays: list[Array]


class NodeMemory:
    """Memory shared by the ranks of one node; all methods but `neighbours` are collective."""

    def __init__(
        self, link: Link, gather: Gather, kinds: tuple[str, ...] = ("memfd", "file", "window")
    ):
        """Share among the ranks of `link`, all on one node; `gather` gathers over it.

        `kinds` are tried in their order, until one works on every rank.
        """
        self._link, self._gather, self._kinds = link, gather, kinds if link.size > 1 else ()
        self.gpu: SharedGpuMemory | None = None  #: shared memory on the GPUs
        self._regions: dict[int, Region] = {}  # by the address of our own array
        self._next_number = 0

    @property
    def kind(self) -> str | None:
        """The kind of memory in use, or the first to be tried; None where none is shared."""
        return self._kinds[0] if self._kinds else None

    @property
    def on_one_gpu(self) -> bool:
        """Whether all ranks compute on the same GPU."""
        return self.gpu is not None and self.gpu.one_gpu

    def zeros(self, length: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """Return zeros (length,) of this rank, aligned to a cache line, mapped by all neighbours.

        Without sharing they are private to this rank, and `neighbours` returns None.
        """
        nbytes = length * np.dtype(dtype).itemsize
        arrays = self._allocate_shared(nbytes)
        if arrays is None:
            return aligned_zeros(length, dtype)
        own_array, address = arrays[self._link.rank], _data_address(arrays[self._link.rank])
        neighbour_arrays = [None if i == self._link.rank else x for i, x in enumerate(arrays)]
        self._regions[address] = Region(self._next_number, nbytes, neighbour_arrays)
        self._next_number += 1
        # Once no array uses our pages, neighbours' pages need not be mapped either.
        weakref.finalize(own_array.base, self._regions.pop, address, None)
        return own_array.view(dtype)

    def zeros_like(self, x: Array) -> Array:
        """Return zeros of the length and dtype of flat `x`, on our GPU if `x` is; see `zeros`."""
        if on_device(x) and self.gpu is not None:
            return self.gpu.zeros(x.size, x.dtype)
        return namespace(x).zeros_like(x) if on_device(x) else self.zeros(x.size, x.dtype)

    def common_zeros(self, length: int, dtype: np.typing.DTypeLike) -> np.ndarray | None:
        """Return zeros (length,), one array for all ranks of the node; None without sharing."""
        arrays = self._allocate_shared(
            length * np.dtype(dtype).itemsize if self._link.rank == 0 else 0
        )
        return None if arrays is None else arrays[0].view(dtype)

    def neighbours(self, x: Array) -> list[Array] | None:
        """Return the arrays of the node's ranks at the place of our contiguous `x`, `x` among them.

        None if `x` is not part of an array of `zeros`, which all ranks call in the same order.
        """
        shared = self.locate(x)
        return None if shared is None else shared.arrays

    def locate(self, x: Array) -> SharedArrays | None:
        """Return the place of our contiguous `x`, None if in no array of `zeros`."""
        if on_device(x):
            return None if self.gpu is None else self.gpu.locate(x)
        address = _data_address(x)
        for start, (number, nbytes, arrays) in self._regions.items():
            offset = address - start
            if offset >= 0 and offset + x.nbytes <= nbytes:
                byte_range = slice(offset, offset + x.nbytes)
                same_range = [
                    x if array is None else array[byte_range].view(x.dtype) for array in arrays
                ]
                return SharedArrays(number, offset, same_range)
        return None

    def _allocate_shared(self, nbytes: int) -> list[np.ndarray] | None:
        """Return all ranks' arrays, uint8, this rank's of `nbytes`; None if no kind works."""
        while self._kinds:
            if (arrays := self._allocate_by_kind(self._kinds[0], nbytes)) is not None:
                return arrays
            self._kinds = self._kinds[1:]
        return None

    def _allocate_by_kind(self, kind: str, nbytes: int) -> list[np.ndarray] | None:
        skew = ALIGN_BYTES + self._link.rank * SKEW_BYTES % PAGE_BYTES
        if kind == "window":
            pages = self._link.endpoint.window(nbytes + ALIGN_BYTES)
            return [_cache_aligned(x) for x in pages] if self._is_true_on_all(bool(pages)) else None
        token = os.urandom(16)
        file = _new_file(FILE_MAKERS[kind], token, skew + nbytes)
        try:
            descriptions = self._gather(
                token + _LAYOUT.pack(skew, nbytes) + file.path.encode() if file else b""
            )
            arrays = list(map(_map_file, descriptions)) if all(descriptions) else [None]
            all_opened = all(x is not None for x in arrays)
            opened_on_all = self._is_true_on_all(all_opened)
        finally:  # also where a rank is lost meanwhile
            if file is not None:
                os.close(file.descriptor)
                with suppress(OSError):  # a memfd has no name to remove
                    os.unlink(file.path)
        return [x for x in arrays if x is not None] if opened_on_all else None

    def _is_true_on_all(self, condition: bool) -> bool:
        """Return whether this kind is `condition` on all ranks."""
        return all(vote == b"y" for vote in self._gather(b"y" if condition else b"n"))


def aligned_zeros(length: int, dtype: np.typing.DTypeLike) -> np.ndarray:
    """Return zeros (length,), private to this process, aligned to a cache line."""
    nbytes = length * np.dtype(dtype).itemsize
    return _cache_aligned(np.zeros(nbytes + ALIGN_BYTES, np.uint8)).view(dtype)


def _cache_aligned(x: np.ndarray) -> np.ndarray:
    """Return bytes `x` without the first 0 .. 64, and 64 shorter in all.

    All ranks that map these pages skip the same number: pages begin at cache lines everywhere.
    """
    skipped_bytes = -_data_address(x) % ALIGN_BYTES
    return x[skipped_bytes : skipped_bytes + x.size - ALIGN_BYTES]


def _create_memfd() -> SharedFile:
    descriptor = os.memfd_create("hpctrain")
    return SharedFile(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")


def _create_shm_file() -> SharedFile:
    import tempfile  # late: on Linux files of memory have no name

    return SharedFile(*tempfile.mkstemp(prefix="hpctrain-", dir=SHM_FOLDER))


FILE_MAKERS: dict[str, Callable[[], SharedFile]] = {
    "memfd": _create_memfd,
    "file": _create_shm_file,
}


def _new_file(
    create_file: Callable[[], SharedFile], token: bytes, nbytes: int
) -> SharedFile | None:
    """Return a file of `nbytes` that begins with `token`; None where the system refuses."""
    file = None
    try:
        file = create_file()
        # Claimed now, by the rank that will use it: too little memory is an error here instead of
        # a SIGBUS later, and the pages lie on this rank's NUMA node.
        os.posix_fallocate(file.descriptor, 0, nbytes)
        os.pwrite(file.descriptor, token, 0)
    except (OSError, AttributeError):  # no memfd_create before Linux 3.17 and glibc 2.27
        if file is not None:
            os.close(file.descriptor)
            with suppress(OSError):
                os.unlink(file.path)
        return None
    return file


def _map_file(description: bytes) -> np.ndarray | None:
    """Return the array at the place of `description`; None if it cannot be mapped.

    In containers the same path may lead to another process: its file lacks the token.
    """
    token, path = description[:16], description[16 + _LAYOUT.size :].decode()
    skew, nbytes = _LAYOUT.unpack_from(description, 16)
    try:
        descriptor = open_file(path, os.O_RDWR, NAMED, own=True)
    except OSError:
        return None
    try:
        if os.pread(descriptor, 16, 0) != token:
            return None
        pages = mmap.mmap(descriptor, skew + nbytes)
    except (OSError, ValueError):  # shorter than described
        return None
    finally:
        os.close(descriptor)
    return np.frombuffer(pages, np.uint8)[skew:]


def _data_address(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])
