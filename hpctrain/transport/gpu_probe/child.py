"""A trial of the paths of GPU memory between two ranks, in a small job of their own.

    mpiexec -n 2 python -m hpctrain.transport.gpu_probe.child 0,1   # GPUs of ranks 0 and 1

    started    both ranks run, bytes in host memory arrive       the CUDA support MPI reports
    ipc        each maps the other's memory, copies, compares    only on one node
    staged     messages of several lengths, through the host     how long they take
    pointer    each gives MPI pointers to GPU memory, compares   an MPI not made for it crashes here
    sizes      the same messages staged and by pointer, in turn  which way is the faster

Rank 0 prints a line of JSON after each stage: the first missing stage is where the job ended.
Never to be called in a rank of a run: if it crashes, so does the run. verdicts.py starts the job
and reads its results.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mpi4py
import numpy as np

mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

from hpctrain.core import launchers  # noqa: E402
from hpctrain.core.printing import say  # noqa: E402
from hpctrain.core.xp import finish  # noqa: E402
from hpctrain.transport.device import gpus  # noqa: E402
from hpctrain.transport.gpu_probe import mpi_claims  # noqa: E402
from hpctrain.transport.gpu_probe.verify import byte_pattern  # noqa: E402
from hpctrain.transport.link import Link  # noqa: E402
from hpctrain.transport.mpi import installation  # noqa: E402
from hpctrain.transport.mpi import link as mpi_link  # noqa: E402
from hpctrain.transport.paths import Path  # noqa: E402
from hpctrain.watch import WatchRecord  # noqa: E402

#: Short, long, and as long as a piece of a bucket: MPIs use another protocol for each.
MESSAGE_SIZES = (1, 1 << 16, 1 << 24)
ROUNDS = 8
OUTPUT_DELAY_S = (
    0.3  # srun drops output when it kills a step: a crash must not follow a line at once
)
#: Lengths at which both paths are timed, from a vote to a long bucket.
TIMED_SIZES = tuple(1 << i for i in (10, 14, 18, 20, 22, 25))
LONG_MESSAGE_BYTES, LONG_ROUNDS = 1 << 22, 3  #: from LONG bytes on fewer rounds: a wire may be slow
HOST_TO_DEVICE, DEVICE_TO_HOST, ANY_DIRECTION = 1, 2, 4  # kinds of cudaMemcpy


class GpuBuffer:
    """Memory of the GPU, from an allocation of its own: IPC handles stand for whole allocations."""

    def __init__(self, runtime: Any, nbytes: int):
        """Allocate it."""
        self._runtime, self.nbytes, self.pointer = runtime, nbytes, runtime.malloc(nbytes)

    def write(self, x: np.ndarray) -> None:
        """Fill the beginning with `x`."""
        self._runtime.memcpy(self.pointer, x.ctypes.data, x.nbytes, HOST_TO_DEVICE)
        self._runtime.deviceSynchronize()

    def read(self, nbytes: int) -> np.ndarray:
        """Return the beginning, uint8."""
        x = np.empty(nbytes, np.uint8)
        self._runtime.deviceSynchronize()
        self._runtime.memcpy(x.ctypes.data, self.pointer, nbytes, DEVICE_TO_HOST)
        return x

    def mpi_message(self, nbytes: int) -> list[Any]:
        """Return the beginning as an MPI buffer, by its pointer."""
        return [MPI.memory.fromaddress(self.pointer, nbytes), nbytes, MPI.BYTE]


def main() -> None:
    """Run the stages; rank 0 prints their results."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected: no core file
    launched, gpu_numbers = launchers.launched(os.environ), sys.argv[1].split(",")
    runtime = _use_gpu(int(gpu_numbers[launched.rank]))
    MPI.Init_thread(MPI.THREAD_MULTIPLE)  # as the run does: MPIs use other paths without
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        sys.exit(f"expected a job of 2 ranks, this one has {comm.size}")
    # Slurm may have several nodes on one machine.
    hosts = comm.allgather(os.environ.get("SLURMD_NODENAME") or MPI.Get_processor_name())
    mpi, alloc_kinds = installation.load_mpi(), comm.Get_info().Get("mpi_memory_alloc_kinds") or ""
    claims = mpi_claims.query_claims(mpi.vendor, mpi.libmpi, alloc_kinds)
    _print_stage(comm, "started", claims=asdict(claims), hosts=hosts)
    outbox, inbox = GpuBuffer(runtime, max(MESSAGE_SIZES)), GpuBuffer(runtime, max(MESSAGE_SIZES))
    if hosts[0] == hosts[1]:
        _print_stage(comm, "ipc", **exchange_by_ipc(comm, runtime, outbox, inbox))
    link = mpi_link.MpiLink(comm.Dup(), WatchRecord(comm.rank, comm.size).entry("main"))
    cupy = gpus.import_cupy()
    _print_stage(comm, "staged", seconds=time_messages(link, cupy, ["staged"]))
    time.sleep(OUTPUT_DELAY_S)
    result = exchange_by_pointer(comm, outbox, inbox)
    _print_stage(comm, "pointer", **result)
    if result["correct"]:
        _print_stage(comm, "sizes", seconds=time_messages(link, cupy, ["staged", "cuda-aware"]))
    comm.Barrier()
    MPI.Finalize()


def exchange_by_ipc(
    comm: MPI.Comm, runtime: Any, outbox: GpuBuffer, inbox: GpuBuffer
) -> dict[str, Any]:
    """Copy the other rank's memory into `inbox`; return correctness, GB/s and the error if any."""
    outbox.write(byte_pattern(comm.rank, outbox.nbytes))
    reason, seconds, all_correct = "", float("inf"), False
    handles = comm.allgather(_ipc_handle(runtime, outbox))
    if errors := [handle for handle in handles if isinstance(handle, str)]:
        return {"correct": False, "gb_s": 0.0, "reason": errors[0]}
    try:
        remote_pointer = runtime.ipcOpenMemHandle(handles[1 - comm.rank])

        def copy() -> None:
            runtime.memcpy(inbox.pointer, remote_pointer, outbox.nbytes, ANY_DIRECTION)
            runtime.deviceSynchronize()

        seconds = min_seconds(copy)
        all_correct = bool(
            (inbox.read(outbox.nbytes) == byte_pattern(1 - comm.rank, outbox.nbytes)).all()
        )
    except runtime.CUDARuntimeError as error:
        reason = str(error)
    outcomes = comm.allgather((all_correct, reason))  # no rank may free its memory before
    if all_correct:
        runtime.ipcCloseMemHandle(remote_pointer)
    return _merge_outcomes(outcomes, outbox.nbytes / seconds)


def exchange_by_pointer(comm: MPI.Comm, outbox: GpuBuffer, inbox: GpuBuffer) -> dict[str, Any]:
    """Exchange by pointers; return correctness, GB/s one way and MPI's error if any."""
    reason, all_correct, seconds = "", True, float("inf")
    try:
        for nbytes in MESSAGE_SIZES:
            outbox.write(byte_pattern(comm.rank, nbytes))
            inbox.write(np.zeros(nbytes, np.uint8))
            peer, incoming = 1 - comm.rank, inbox.mpi_message(nbytes)
            comm.Sendrecv(outbox.mpi_message(nbytes), peer, 0, incoming, peer, 0)
            all_correct &= bool((inbox.read(nbytes) == byte_pattern(1 - comm.rank, nbytes)).all())
        seconds = min_seconds(lambda: _send_one_way(comm, outbox, inbox))
    except MPI.Exception as error:
        reason, all_correct = str(error), False
    return _merge_outcomes(comm.allgather((all_correct, reason)), max(MESSAGE_SIZES) / seconds)


def time_messages(
    link: Link, cupy: Any, paths: Sequence[Path], sizes: Sequence[int] = TIMED_SIZES
) -> list[tuple[int | float, ...]]:
    """Return for each of `sizes` the bytes, and the seconds of a message on each of `paths`.

    Paths are interleaved; the time is half of the fastest round trip.
    """
    fastest_by_path: dict[Path, dict[int, float]] = {path: {} for path in paths}
    x = cupy.zeros(max(sizes), np.uint8)
    interleaved_paths = [(i, path) for i in range(ROUNDS) for path in paths]
    for i, path in interleaved_paths:
        link.endpoint.traffic.set_paths([path] * link.size)
        fastest_times = fastest_by_path[path]
        for nbytes in (n for n in sizes if n < LONG_MESSAGE_BYTES or i < LONG_ROUNDS):
            start = time.perf_counter()
            _send_round_trip(link, x[:nbytes])
            fastest_times[nbytes] = min(
                fastest_times.get(nbytes, math.inf), time.perf_counter() - start
            )
    return [
        (n, *(fastest_times[n] / 2 for fastest_times in fastest_by_path.values())) for n in sizes
    ]


def _send_round_trip(link: Link, x: Any) -> None:
    peer = 1 - link.rank
    if link.rank == 0:
        link.isend(x, peer).wait()
    link.irecv(x, peer).wait()
    if link.rank == 1:
        link.isend(x, peer).wait()
    finish(x)


def min_seconds(function: Callable[[], None]) -> float:
    """Return the seconds of the fastest of ROUNDS calls."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _use_gpu(ordinal: int) -> Any:
    """Make the GPU current before MPI starts; return CUDA's runtime."""
    gpus.use_gpu(ordinal)
    return gpus.cuda_runtime()


def _ipc_handle(runtime: Any, buffer: GpuBuffer) -> bytes | str:
    """Return the IPC handle, or CUDA's error text."""
    try:
        handle: bytes = runtime.ipcGetMemHandle(buffer.pointer)
    except runtime.CUDARuntimeError as error:
        return str(error)
    return handle


def _send_one_way(comm: MPI.Comm, outbox: GpuBuffer, inbox: GpuBuffer) -> None:
    if comm.rank == 0:
        comm.Send(outbox.mpi_message(max(MESSAGE_SIZES)), 1)
    else:
        comm.Recv(inbox.mpi_message(max(MESSAGE_SIZES)), 0)
    comm.Barrier()


def _merge_outcomes(outcomes: list[tuple[bool, str]], rate: float) -> dict[str, Any]:
    all_correct = all(correct for correct, _ in outcomes)
    reason = next(
        (error_text for _, error_text in outcomes if error_text),
        "" if all_correct else "other bytes arrived",
    )
    return {"correct": all_correct, "gb_s": rate / 1e9, "reason": reason}


def _print_stage(comm: MPI.Comm, stage: str, **result: Any) -> None:
    if comm.rank == 0:
        say(json.dumps({"stage": stage, **result}))


if __name__ == "__main__":
    main()
