"""NCCL by way of CuPy: NVIDIA's own all-reduce, between one GPU of each rank.

    rank 0       id = 128 bytes  --by our own links-->  all ranks join one communicator

    on a GPU     the sum over all ranks there, in the current stream
    elsewhere    host memory --copy--> GPU, sum over all ranks there --copy--> host memory

A kernel of NCCL waits for lost ranks for ever. So where ranks survive a loss, this rank polls the
stream and its link after each call; when a rank is lost it aborts the communicator, which ends the
kernel, and the World of the ranks that are left makes another.

CuPy is imported only if the algorithm is selected. **Not yet run on a GPU**: tests run
it against a stand-in for CuPy that checks every call. Source of the calls: the reference of
`cupy.cuda.nccl.NcclCommunicator`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.core.xp import Array, on_device

OPERATIONS = {
    np.add: "NCCL_SUM",
    np.multiply: "NCCL_PROD",
    np.minimum: "NCCL_MIN",
    np.maximum: "NCCL_MAX",
}
DTYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
}
ID_BYTES = 128
#: Returns once a condition holds; raises LostRankError if a rank is lost meanwhile.
WaitFor = Callable[[Callable[[], bool]], None]


def load_libraries() -> tuple[Any, Any]:
    """Return the modules `cupy` and `cupy.cuda.nccl`; raise UsageError if one is missing."""
    try:
        import cupy
        from cupy.cuda import nccl

        _ = nccl.NcclCommunicator  # without NCCL the module exists, but is empty
    except (ImportError, AttributeError) as error:
        raise UsageError(
            "algorithm 'nccl' needs CuPy and NCCL: pip install 'hpctrain[cuda12x]' "
            "nvidia-nccl-cu12 (with CUDA 13: cuda13x and nvidia-nccl-cu13), or take algorithm = "
            f"'auto'; seen: {error}"
        ) from None
    if not count_devices(cupy):
        raise UsageError(
            "algorithm 'nccl' needs a GPU for each rank, and CUDA sees none here; look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES, or take algorithm = 'auto'"
        )
    return cupy, nccl


def new_unique_id() -> np.ndarray:
    """Return the unique id of a new communicator, for all its ranks: (128,) uint8."""
    return np.frombuffer(load_libraries()[1].get_unique_id(), np.uint8).copy()


class Communicator:
    """An NCCL communicator over all ranks, one GPU per rank; used by one thread."""

    def __init__(
        self, rank: int, size: int, device: int, unique_id: np.ndarray, survives: bool = False
    ):
        """Join the communicator of `unique_id`, made by `new_unique_id`; all ranks must call.

        `survives`: whether this rank goes on after a loss.
        """
        self._survives = False
        self._cupy, self._nccl = load_libraries()
        self._device = self._cupy.cuda.Device(device)
        with self._device:
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._comm = self._nccl.NcclCommunicator(size, unique_id.tobytes(), rank)
        self._survives = survives

    def abort(self) -> None:
        """End the calls under way, and free the communicator; the other ranks need not call."""
        if self._survives:
            self._survives = False
            self._comm.abort()

    def __del__(self) -> None:
        """Free the communicator without its peers, which may be lost."""
        self.abort()

    def allreduce(self, x: Array, op: Any, wait_for: WaitFor | None = None) -> None:
        """Reduce flat `x` in place over all ranks; GPU arrays in the current stream's order.

        With `wait_for` this returns when the sum is complete; its LostRankError ends the call.
        """
        try:
            self._allreduce(x, op, wait_for)
        except LostRankError:
            self.abort()
            raise

    def _allreduce(self, x: Array, op: Any, wait_for: WaitFor | None) -> None:
        if op not in OPERATIONS or x.dtype.name not in DTYPES:
            raise UsageError(
                f"NCCL reduces no arrays of {x.dtype} here; take an algorithm of hpctrain"
            )
        nccl_dtype, nccl_op = (
            getattr(self._nccl, name) for name in (DTYPES[x.dtype.name], OPERATIONS[op])
        )
        if on_device(x):
            stream = self._cupy.cuda.get_current_stream()
            self._comm.allReduce(x.data.ptr, x.data.ptr, x.size, nccl_dtype, nccl_op, stream.ptr)
            if wait_for is not None:
                wait_for(lambda: stream.done)
            return
        with self._device, self._stream:
            y = self._cupy.asarray(x)
            self._comm.allReduce(
                y.data.ptr, y.data.ptr, y.size, nccl_dtype, nccl_op, self._stream.ptr
            )
            if wait_for is not None:  # before the copy, which would wait inside CUDA
                wait_for(lambda: self._stream.done)
            y.get(stream=self._stream, out=x)
            self._stream.synchronize()


def count_devices(cupy: Any) -> int:
    """Return the number of GPUs that this process may use."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or an incompatible one
        return 0
