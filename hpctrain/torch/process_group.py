"""The process group "hpctrain" of `torch.distributed`: ranks of MPI under PyTorch's names."""

from __future__ import annotations

import sys
from datetime import timedelta
from inspect import isfunction
from typing import Any

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from hpctrain.core.errors import LostRankError, UsageError
from hpctrain.torch.autoload import BACKEND
from hpctrain.torch.communicator import Communicator
from hpctrain.torch.data_movement import DataMovement
from hpctrain.torch.functional import add_out_variants
from hpctrain.torch.job import check_limit, end_after_loss, start_job, uses_threads
from hpctrain.torch.operations import BatchWork
from hpctrain.torch.point_to_point import PointToPoint
from hpctrain.torch.reductions import Reductions
from hpctrain.torch.work import MessageWork, OperationWork, RunningWork
from hpctrain.world import World


def make_process_group(options: Any) -> ProcessGroup:
    """Return the group of `options`, a `_DistributedBackendOptions`; collective over its ranks."""
    refuse_other_backends()
    add_out_variants()
    job = start_job(options.timeout)
    size, rank, ranks = options.group_size, options.group_rank, options.global_ranks_in_group
    is_default_group = not ranks
    ranks = _ranks_in_order(job, rank, size) if is_default_group else _ranks_in_mpi(job, ranks)
    limit_s = options.timeout.total_seconds()
    try:
        communicator = Communicator(job, ranks, options.group_id, limit_s, uses_threads(job))
    except LostRankError:
        end_after_loss(job)
    return ProcessGroup(communicator, rank, size, options.store)


#: The rank in MPI of each rank of the default group; empty if that is of another backend.
_default_ranks: list[int] = []


def _ranks_in_mpi(job: World, ranks: list[int]) -> list[int]:
    """Return the rank in MPI of each of `ranks` of the default group.

    Raises UsageError if that is of another backend and this rank has another number in it.
    """
    if _default_ranks:
        return [_default_ranks[rank] for rank in ranks]
    actual = dist.get_rank(), dist.get_world_size()
    if actual != (job.rank, job.size):
        raise UsageError(
            f"a group of the backend hpctrain beside a default group of another: expected the "
            f"ranks of MPI, {job.rank} of {job.size}, seen rank {actual[0]} of {actual[1]}"
        )
    return ranks


def _ranks_in_order(job: World, rank: int, size: int) -> list[int]:
    """Return the rank in MPI of each rank of the default group; collective.

    Raises UsageError if PyTorch was given other ranks than MPI has.
    """
    if size != job.size:
        raise UsageError(
            f"the backend hpctrain has the ranks of MPI, {job.size}, but PyTorch was given rank "
            f"{rank} of {size}: start the script with `mpirun -n {size}` or srun instead of "
            "torchrun, or leave rank, world_size and init_method out"
        )
    given = [int(text) for text in job.gather(str(rank))]
    if sorted(given) != list(range(size)):
        raise UsageError(
            f"expected each of the ranks 0 to {size - 1} once; PyTorch was given {given}"
        )
    _default_ranks[:] = sorted(range(size), key=given.__getitem__)
    return _default_ranks


def refuse_other_backends() -> None:
    """Raise UsageError if the group that PyTorch makes has another backend beside this.

    PyTorch would ignore it: a process group in Python takes tensors of every device.
    """
    backends = _backends_by_device()
    if {*backends.values()} - {BACKEND}:
        seen = ",".join(f"{device}:{name}" for device, name in backends.items())
        raise UsageError(
            f'the backend hpctrain serves tensors of every device: expected "hpctrain" alone, seen '
            f'"{seen}"; make a second group for the other, new_group(backend="nccl")'
        )


def _backends_by_device() -> dict[str, str]:
    """Return the backend of each device for the group under way; PyTorch does not hand it over."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if "backend_config" in frame.f_locals:
            return dict(frame.f_locals["backend_config"].get_device_backend_map())
    return {}


class ProcessGroup(Reductions, DataMovement, PointToPoint, dist.ProcessGroup):
    """See `torch.distributed.ProcessGroup`; C++ asks for some properties by other spellings."""

    def __init__(self, communicator: Communicator, rank: int, size: int, store: Any):
        dist.ProcessGroup.__init__(self, rank, size)
        Reductions.__init__(self, communicator)
        self._rank, self._size, self._store = rank, size, store
        self._name = self._description = ""

    def name(self) -> str:
        return BACKEND

    getBackendName = _get_backend_name = name  # noqa: N815

    def rank(self) -> int:
        return self._rank

    getRank = rank  # noqa: N815

    def size(self) -> int:
        return self._size

    getSize = size  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    group_name = property(getGroupName)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    group_desc = property(getGroupDesc)

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return list(map(torch.device, kinds))

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        """Ignore the device: tensors of any device of this rank are accepted."""

    def __repr__(self) -> str:
        return f"ProcessGroup({BACKEND}, rank {self._rank} of {self._size}, {self._name})"

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are compared by their digests."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Let later waits end after `timeout`; raise UsageError beyond the job's limit.

        The watch ends calls that wait for longer than the limit of `init_process_group`.
        """
        check_limit(timeout.total_seconds())
        self.communicator.set_limit(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Finish what is under way and free the group's links; all ranks of the group must call."""
        self._bound_calls.clear()
        self.communicator.close()

    def abort(self) -> None:
        """Let operations that wait for other ranks fail, and all later calls; see Progress."""
        self.communicator.progress.abort()


def _keep_compilers_out() -> None:
    """Let torch.compile run operations as they are, with all that they call.

    C++ calls them, and waits for them, as in DDP's forward pass, while compiled code runs; Dynamo
    would trace them.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    works = OperationWork, RunningWork, MessageWork, BatchWork
    for family in (Reductions, DataMovement, PointToPoint, *works):
        for method in filter(isfunction, vars(family).values()):
            eval_frame.set_code_exec_strategy(method.__code__, skip)


_keep_compilers_out()
