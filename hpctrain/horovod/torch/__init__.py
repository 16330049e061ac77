"""The API of `horovod.torch` on the ranks of MPI.

    import hpctrain.horovod.torch as hvd
    hvd.init()                                  under mpirun, srun, `hpctrain launch`, or alone

Operations and their errors: reductions.py, movements.py. See docs/horovod.md.
"""

from hpctrain.core.errors import UsageError

try:
    import torch as _torch  # noqa: F401
except ImportError:
    raise UsageError("hpctrain.horovod needs PyTorch: pip install 'hpctrain[torch]'") from None

from hpctrain.horovod.torch import elastic
from hpctrain.horovod.torch.compression import Compression
from hpctrain.horovod.torch.elastic import HostsUpdatedInterrupt
from hpctrain.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hpctrain.horovod.torch.handles import barrier, join, poll, synchronize
from hpctrain.horovod.torch.job import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
)  # fmt: skip
from hpctrain.horovod.torch.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)  # fmt: skip
from hpctrain.horovod.torch.named.entries import HorovodInternalError
from hpctrain.horovod.torch.optimizer import DistributedOptimizer
from hpctrain.horovod.torch.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)  # fmt: skip
from hpctrain.horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)  # fmt: skip
from hpctrain.horovod.torch.start import init, shutdown
from hpctrain.horovod.torch.submission import Adasum, Average, Max, Min, Product, Sum
from hpctrain.horovod.torch.sync_batch_norm import SyncBatchNorm
from hpctrain.horovod.torch.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError",
    "HostsUpdatedInterrupt", "Max",
    "Min", "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather",
    "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "elastic", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter",
    "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip
