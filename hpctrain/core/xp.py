"""Which library an array belongs to; the one place outside the wire that knows CuPy exists.

Array code is written once, for NumPy and CuPy alike, with the functions of the module that
`namespace` returns. Features of devices alone (streams, own kernels, another memory) have functions
here that do nothing to arrays of the host.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np

from hpctrain.core.errors import GpuMemoryError, UsageError

Array = Any  #: a numpy.ndarray or a cupy.ndarray; no type says "either" without importing CuPy
Event = Any  #: a point in a stream, as `event` returns it; None: no device


def namespace(x: Array) -> Any:
    """Return the module, `numpy` or `cupy`, whose functions take the array `x`."""
    # A caller with a CuPy array has imported CuPy already, so sys.modules is enough: an import
    # would cost every CPU run a second and start CUDA before a device is chosen.
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        return cupy
    return np


def on_device(x: Array) -> bool:
    """Return whether `x` lies in the memory of a GPU."""
    return type(x) is not np.ndarray and namespace(x) is not np


def to_host(x: Array, out: np.ndarray | None = None) -> np.ndarray:
    """Return `x` in the memory of the host, in `out` if given; `x` itself if it is there already.

    A copy waits for the work of this thread's stream.
    """
    if on_device(x):
        return x.get(out=out)
    if out is None:
        return x
    out[...] = x
    return out


def like(x: Array, values: Any, dtype: Any = None) -> Array:
    """Return `values`, of the host or of a device, as an array where `x` is, of `dtype` or `x`'s.

    An array already in that memory and dtype is returned itself.
    """
    xp, dtype = namespace(x), np.dtype(x.dtype if dtype is None else dtype)
    if xp is np:
        return np.asarray(to_host(values), dtype)
    if not on_device(values):  # the fewer bytes travel
        values = np.asarray(values)
        values = values.astype(dtype) if values.itemsize > dtype.itemsize else values
    return xp.asarray(values).astype(dtype, copy=False)


def widened(x: Array) -> Array:
    """Return floating-point `x` in 32 bits if it has 16, itself if it has more."""
    return x.astype(np.float32) if x.itemsize == 2 else x


def narrowed(y: Array, x: Array) -> Array:
    """Return `y` in the dtype of `x`, itself if it has that."""
    return y if y.dtype == x.dtype else y.astype(x.dtype)


def copy(x: Array, values: Array) -> None:
    """Write `values`, of the host or of a device, into all of `x`."""
    x[...] = like(x, values)


def address_of(x: Array) -> int:
    """Return the address at which `x` begins, in the memory where it is."""
    if on_device(x):
        return int(x.data.ptr)
    return int(x.__array_interface__["data"][0])


def fused(function: Callable[..., None], x: Array) -> Callable[..., None]:
    """Return `function(xp, ...)` for arrays like `x`, without its first argument.

    On a device it becomes one kernel, which reads and writes each element once: `function` may
    only compute element by element, by operators and by functions of `xp`. Its arguments are
    arrays of one length and numbers; what it writes, it writes in place.
    """
    xp = namespace(x)
    return partial(function, xp) if xp is np else _kernel(xp, function)


@cache
def _kernel(cupy: Any, function: Callable[..., None]) -> Callable[..., None]:
    name = function.__name__.strip("_")
    return cupy.fuse(kernel_name=name)(partial(function, cupy))


def raw_kernel(x: Array, source: str, name: str) -> Callable[..., None]:
    """Return function `name` of CUDA `source`, to be called with (blocks,), (threads,), (...)."""
    return _raw_kernel(namespace(x), source, name)


@cache
def _raw_kernel(cupy: Any, source: str, name: str) -> Callable[..., None]:
    return cupy.RawKernel(source, name)


def fetch(x: Array) -> Callable[[], np.ndarray]:
    """Begin to copy small `x` to the host; return a function that waits for the copy alone."""
    if not on_device(x):
        return lambda: x
    stream, host = namespace(x).cuda.get_current_stream(), pinned_like(x)
    x.get(out=host, blocking=False)
    copy_event = stream.record()

    def arrived() -> np.ndarray:
        copy_event.synchronize()
        return host

    return arrived


def pinned_like(x: Array) -> np.ndarray:
    """Return pinned memory of the host for `x` of a device: copies to it are asynchronous."""
    return np.frombuffer(pinned(x.nbytes), x.dtype, x.size).reshape(x.shape)


def event(x: Array) -> Event:
    """Record an event in this thread's stream; None if `x` is of the host."""
    return namespace(x).cuda.get_current_stream().record() if on_device(x) else None


def wait_for(event: Event) -> None:
    """Order later work of this thread's stream after `event`; the host does not wait."""
    if event is not None:
        sys.modules["cupy"].cuda.get_current_stream().wait_event(event)


def finish(x: Array) -> None:
    """Wait for all work of this thread's stream, if `x` is on a device.

    Before that, a reader by the address of `x` (MPI, another rank) may find its old contents.
    """
    if on_device(x):
        namespace(x).cuda.get_current_stream().synchronize()


def own_stream(x: Array) -> AbstractContextManager[Any]:
    """Give this thread a stream of its own, on the device of `x`, within the block.

    A thread begins with the first device and its default stream: all its work with arrays on a
    device belongs in such a block.
    """
    return _own_stream(x) if on_device(x) else nullcontext()


def stream_of_thread(x: Array) -> AbstractContextManager[Any]:
    """Return a new stream on the device of `x`; within the block it is the current one.

    It can be entered any number of times.
    """
    with x.device:
        return namespace(x).cuda.Stream(non_blocking=True)


def keep_stream(x: Array) -> None:
    """Give this thread, as long as it lives, a stream of its own on the device of `x`."""
    x.device.use()
    namespace(x).cuda.Stream(non_blocking=True).use()


@contextmanager
def _own_stream(x: Array) -> Iterator[None]:
    with x.device, namespace(x).cuda.Stream(non_blocking=True):
        yield


def allow_tf32(allowed: bool) -> None:
    """Set whether the current device may multiply float32 with 10 bits of mantissa.

    It applies to all later products of this process. CUPY_TF32 would not: CuPy reads it at its
    first product. A device older than Ampere has no such products; there CuPy warns, and uses all
    bits.
    """
    products = sys.modules["cupy"]._core._routines_linalg
    kind = products.COMPUTE_TYPE_TF32 if allowed else products.COMPUTE_TYPE_DEFAULT
    products.set_compute_type(np.float32, kind)


def zeros(length: int, dtype: Any) -> Array:
    """Return zeros (length,) on the device that is current in this thread."""
    return sys.modules["cupy"].zeros(length, dtype)


def array_at(address: int, nbytes: int, dtype: np.dtype, device: int) -> Array:
    """Return flat GPU memory of another library as an array, which does not keep it alive.

    Raises UsageError without CuPy.
    """
    cupy = _import_cupy()
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(nbytes // dtype.itemsize, dtype, pointer)


@contextmanager
def foreign_stream(pointer: int, device: int) -> Iterator[None]:
    """Make another library's CUDA stream current for CuPy, so that work is done in its order."""
    cupy = _import_cupy()
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(pointer, device):
        yield


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise UsageError(
            "GPU arrays of another library need CuPy: pip install hpctrain[cuda12x], or cuda13x"
        ) from None
    return cupy


def pinned(nbytes: int) -> Any:
    """Return memory of the host, at least a byte, that a device copies from and to by itself.

    Raises GpuMemoryError if there is none left.
    """
    cupy = sys.modules["cupy"]
    try:
        return cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
    except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
        if shortage(error) is None:
            raise
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        raise GpuMemoryError(
            f"out of pinned host memory, by which GPU arrays travel: {nbytes:,} bytes asked, "
            f"{free_bytes:,} free on the host. Take fewer ranks per node, or ask for more memory, "
            "locked memory, too (ulimit -l)"
        ) from error


#: The messages of CuPy, CUDA and cuBLAS about a lack of device memory.
_SHORT = re.compile(
    r"Out of memory allocating ([\d,]+) bytes"
    r"|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED"
)


def shortage(error: BaseException, nbytes: int | None = None) -> GpuMemoryError | None:
    """Convert a CUDA out-of-memory error to GpuMemoryError; return None for other errors.

    `nbytes`: the bytes requested, in case CUDA does not report them.
    """
    if isinstance(error, GpuMemoryError):
        return error
    match = _SHORT.search(str(error))
    if match is None or "cupy" not in sys.modules:
        return None
    bytes_text = match[1] or ("a number of" if nbytes is None else f"{nbytes:,}")
    return GpuMemoryError(
        f"{_describe_memory()}: {bytes_text} bytes asked. Take a smaller batch or more [optimizer] "
        "micro_batches, [run] precision = 'bf16', or fewer ranks per GPU"
    )


@contextmanager
def shortage_raised() -> Iterator[None]:
    """Raise GpuMemoryError for an out-of-memory error of CuPy or CUDA within the block."""
    try:
        yield
    except Exception as error:
        if (shortage_bytes := shortage(error)) is None:
            raise
        raise shortage_bytes from error


def _describe_memory() -> str:
    """Return a sentence on the current device's free memory and on this process's share."""
    cupy = sys.modules["cupy"]
    try:
        device = cupy.cuda.runtime.getDevice()
        free_bytes, total_bytes = cupy.cuda.runtime.memGetInfo()
    except cupy.cuda.runtime.CUDARuntimeError:  # too little memory for CUDA itself
        return "out of memory on a GPU that does not report its free memory"
    pool_bytes = cupy.get_default_memory_pool().total_bytes()
    return (
        f"GPU {device} is out of memory ({free_bytes:,} of {total_bytes:,} bytes free now, "
        f"{pool_bytes:,} held by this rank's arrays)"
    )
