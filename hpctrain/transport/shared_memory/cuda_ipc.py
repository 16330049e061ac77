"""GPU memory shared by the ranks of a node: each rank's own, mapped by all through CUDA IPC.

    rank 0   [ token | array ....... ]  <---- maps ---- ranks 1, 2, ...    on the same GPU, or on
    rank 1   [ token | array ....... ]  <---- maps ---- ranks 0, 2, ...    one that reaches it

Each array has an allocation of its own by cudaMalloc, in whole pages of 2 MiB: a handle stands for
a whole allocation, so neighbours of an array in CuPy's pool would be shared, too, and the driver
packs small ones together. A rank that maps one checks the token at its start: a handle that leads
elsewhere is refused. If any rank cannot map any other (a container, GPUs that do not reach each
other, another GPU hidden by the launcher) all allocate private memory, with one warning.

An allocation that a neighbour maps must not be freed. One whose array is gone on every rank is
closed by all and then freed at the next allocation, which is collective.

A rank may read what another wrote only after that rank's stream has finished and both have passed a
barrier or flags: nothing here orders memory. Kernels of two processes never wait for each other: on
one GPU they might never run at once.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing

from hpctrain.core.errors import GpuMemoryError
from hpctrain.core.xp import Array, shortage
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.host import Gather, SharedArrays

log = logging.getLogger(__name__)
PAGE_BYTES, HEADER_BYTES, TOKEN_BYTES = 2 << 20, 512, 16
FIRST_ALLOCATION_NUMBER = (
    1 << 40
)  # beyond the kinds of memory.py: two places are alike only if their kinds are
_DESCRIPTION = struct.Struct(f"<{TOKEN_BYTES}sq64s")  # token, bytes of the array, handle


class _MemoryOwner:
    """The owner of an array's memory: it lives as long as some array of the allocation."""


@dataclass(frozen=True)
class _Allocation:
    """One allocation: local address, bytes of the array, and the arrays' addresses on all ranks."""

    address: int
    nbytes: int
    addresses: list[int]  #: every rank's array, by its address in this rank's address space
    mapped_pointers: list[int] = field(default_factory=list)  #: pointers to close


class SharedGpuMemory:
    """GPU memory shared by a node's ranks; all methods but `locate` are collective."""

    def __init__(self, link: Link, gather: Gather, one_gpu: bool):
        """Share among the ranks of `link`, all on one node; `gather` gathers over it.

        `one_gpu`: the ranks share a GPU.
        """
        import cupy

        self.one_gpu = one_gpu
        self._link, self._gather, self._xp = link, gather, cupy
        self._allocations: dict[int, _Allocation] = {}  # by number
        self._dropped_numbers: set[int] = set()  # whose array is gone here
        self._cached_arrays: dict[tuple[int, int, str], SharedArrays] = {}
        self._next_number = FIRST_ALLOCATION_NUMBER
        self.shares = link.size > 1  #: false once a handle was refused
        self.refused = False  #: whether one was

    def zeros(self, length: int, dtype: np.typing.DTypeLike) -> Array:
        """Return zeros (length,) on this rank's GPU, mapped by all neighbours.

        Without sharing they are private to this rank, and `locate` returns None. Raises
        GpuMemoryError on all ranks if any GPU has too little memory.
        """
        dtype = np.dtype(dtype)
        self._free_dropped()
        address = self._allocate(length * dtype.itemsize)
        allocation = self._map_everywhere(address, length * dtype.itemsize) if self.shares else None
        owner, number = _MemoryOwner(), self._next_number
        self._next_number += 1
        if allocation is None:
            finalizer = weakref.finalize(owner, self._xp.cuda.runtime.free, address)
        else:
            self._allocations[number] = allocation
            finalizer = weakref.finalize(owner, self._dropped_numbers.add, number)
        finalizer.atexit = False  # CUDA may be gone by then, and frees all itself
        return self._view_memory(address + HEADER_BYTES, length, dtype, owner)

    def locate(self, x: Array) -> SharedArrays | None:
        """Return the place of this rank's contiguous `x`, None if in no array of `zeros`."""
        key = (x.data.ptr, x.nbytes, x.dtype.name)
        if key not in self._cached_arrays:
            number = self._find_allocation(x.data.ptr, x.nbytes)
            if number is None:
                return None
            self._cached_arrays[key] = self._shared_arrays(number, x)
        number, offset, arrays = self._cached_arrays[key]
        rank = self._link.rank
        return SharedArrays(number, offset, [*arrays[:rank], x, *arrays[rank + 1 :]])

    def _shared_arrays(self, number: int, x: Array) -> SharedArrays:
        """Return a place to cache, without `x`, which would keep its own allocation alive."""
        base_addresses = self._allocations[number].addresses
        offset = x.data.ptr - base_addresses[self._link.rank]
        arrays = [
            self._view_memory(base_address + offset, x.size, x.dtype, None)
            for base_address in base_addresses
        ]
        return SharedArrays(number, offset, arrays)

    def _find_allocation(self, pointer: int, nbytes: int) -> int | None:
        """Return the number of the allocation in which memory lies."""
        for number, allocation in self._allocations.items():
            start = allocation.addresses[self._link.rank]
            if start <= pointer and pointer + nbytes <= start + allocation.nbytes:
                return number
        return None

    def _view_memory(self, pointer: int, length: int, dtype: np.dtype, owner: Any) -> Array:
        cuda = self._xp.cuda
        # Declared as memory of our GPU even if it is a neighbour's: CuPy must not copy it first.
        device = cuda.runtime.getDevice()
        memory = cuda.UnownedMemory(pointer, max(length * dtype.itemsize, 1), owner, device)
        return self._xp.ndarray((length,), dtype, cuda.MemoryPointer(memory, 0))

    def _allocate(self, nbytes: int) -> int:
        """Return the address of zeros; raise GpuMemoryError on all ranks if one has too little."""
        runtime, size = (
            self._xp.cuda.runtime,
            -(-(nbytes + HEADER_BYTES) // PAGE_BYTES) * PAGE_BYTES,
        )
        address, error_text = self._malloc(size)
        error_texts = [fault.decode() for fault in self._gather(error_text.encode())]
        if any(error_texts):
            runtime.free(address)
            rank_errors = [
                f"local rank {rank}: {text}" for rank, text in enumerate(error_texts) if text
            ]
            raise GpuMemoryError("; ".join(rank_errors))
        runtime.memset(address, 0, size)
        runtime.deviceSynchronize()
        return int(address)

    def _malloc(self, size: int) -> tuple[int, str]:
        """Return the address of new memory and ""; 0 and the error text if none is left."""
        runtime, error_text = self._xp.cuda.runtime, ""
        for free_unused in (self._xp.get_default_memory_pool().free_all_blocks, _empty_torch_cache):
            free_unused()  # what other allocators keep is not free for us
            try:
                return runtime.malloc(size), ""
            except runtime.CUDARuntimeError as error:
                if (text := shortage(error, size)) is None:
                    raise
                error_text = str(text)
        return 0, error_text

    def _map_everywhere(self, address: int, nbytes: int) -> _Allocation | None:
        """Return the allocation mapped by all ranks, None if any rank cannot map it."""
        descriptions = self._gather(self._describe_memory(address, nbytes))
        mapped_pointers = list(self._map_descriptions(descriptions)) if all(descriptions) else []
        fault = "" if len(mapped_pointers) == self._link.size else "a handle was refused"
        if any(self._gather(fault.encode())):
            self._close_pointers([pointer for pointer in mapped_pointers if pointer])
            self.shares, self.refused = False, True
            if self._link.rank == 0:
                _warn_of_refusal()
            return None
        base_addresses = [(pointer or address) + HEADER_BYTES for pointer in mapped_pointers]
        return _Allocation(
            address, nbytes, base_addresses, [pointer for pointer in mapped_pointers if pointer]
        )

    def _describe_memory(self, address: int, nbytes: int) -> bytes:
        """Return the bytes by which neighbours map our memory; b"" where CUDA refuses."""
        runtime, token = self._xp.cuda.runtime, os.urandom(TOKEN_BYTES)
        try:
            handle = runtime.ipcGetMemHandle(address)
        except runtime.CUDARuntimeError:
            return b""
        runtime.memcpy(address, _data_address(token), TOKEN_BYTES, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()  # a copy from pageable memory may return before it arrived
        return _DESCRIPTION.pack(token, nbytes, handle)

    def _map_descriptions(self, descriptions: Sequence[bytes]) -> Iterator[int]:
        """Yield the address of every rank's memory, 0 for our own; stop at the first refusal."""
        runtime = self._xp.cuda.runtime
        for rank, description in enumerate(descriptions):
            if rank == self._link.rank:
                yield 0
                continue
            token, _, handle = _DESCRIPTION.unpack(description)
            pointer = 0
            try:
                pointer = runtime.ipcOpenMemHandle(handle)
                is_right = self._is_reachable(pointer) and self._read_token(pointer) == token
            except runtime.CUDARuntimeError:
                is_right = False
            if not is_right:
                if pointer:
                    runtime.ipcCloseMemHandle(pointer)
                return
            yield pointer

    def _is_reachable(self, pointer: int) -> bool:
        """Return whether kernels on our GPU may read at `pointer`; copies need no such access."""
        cuda = self._xp.cuda
        device, owner = cuda.runtime.getDevice(), cuda.UnownedMemory(pointer, 1, None).device_id
        return device == owner or bool(cuda.runtime.deviceCanAccessPeer(device, owner))

    def _read_token(self, pointer: int) -> bytes:
        token, runtime = np.empty(TOKEN_BYTES, np.uint8), self._xp.cuda.runtime
        runtime.memcpy(token.ctypes.data, pointer, TOKEN_BYTES, runtime.memcpyDeviceToHost)
        return token.tobytes()

    def _free_dropped(self) -> None:
        """Free allocations whose arrays are gone on all ranks, after all have closed them."""
        dropped_text = " ".join(str(number) for number in sorted(self._dropped_numbers))
        dropped_sets = [
            frozenset(map(int, text.split())) for text in self._gather(dropped_text.encode())
        ]
        dropped_everywhere = dropped_sets[0].intersection(*dropped_sets)
        if not dropped_everywhere:
            return
        unused_allocations = [
            self._allocations.pop(number) for number in sorted(dropped_everywhere)
        ]
        self._dropped_numbers -= dropped_everywhere
        self._cached_arrays.clear()
        for allocation in unused_allocations:
            self._close_pointers(allocation.mapped_pointers)
        self._link.barrier()
        for allocation in unused_allocations:
            self._xp.cuda.runtime.free(allocation.address)

    def _close_pointers(self, pointers: Sequence[int]) -> None:
        for pointer in pointers:
            self._xp.cuda.runtime.ipcCloseMemHandle(pointer)


def shared_gpu_memory(link: Link, gather: Gather, gpus: Sequence[str]) -> SharedGpuMemory | None:
    """Return the shared memory of the ranks of `link` on `gpus`; None if a rank has no GPU."""
    return SharedGpuMemory(link, gather, len(set(gpus)) == 1) if all(gpus) else None


def _empty_torch_cache() -> None:
    """Give back the memory that PyTorch keeps for later tensors, if it is in use here."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@cache
def _warn_of_refusal() -> None:
    log.warning(
        "CUDA IPC is refused between the ranks of a node (containers need --ipc=host and one "
        "PID namespace; GPUs must be visible to all ranks): GPU memory goes through host memory"
    )


def _data_address(data: bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
