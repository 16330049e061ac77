"""Two ranks try what can be done with GPU memory, in a small job of their own.

    mpiexec -n 2 python -m hpctrain.transport.trial 0,1       # the GPU of rank 0 and of rank 1

    started    both ranks run, bytes in host memory arrive       what MPI says of itself
    ipc        each maps the other's memory, copies, compares    only on one node
    staged     messages of several lengths, through the host     how long they take
    pointer    each gives MPI pointers to GPU memory, compares   an MPI not made for it crashes here
    sizes      the same messages staged and by pointer, in turn  which way is the faster

Rank 0 prints a line of JSON after each stage: what is missing is where the job ended. Never to be
called in a rank of a run: if it crashes, so does the run. Results are taken, and the job started,
by verdicts.py.
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

from hpctrain import launchers  # noqa: E402
from hpctrain.transport import claims, gpus, mpi, probe  # noqa: E402
from hpctrain.transport.first import pattern  # noqa: E402
from hpctrain.transport.link import Link  # noqa: E402
from hpctrain.transport.paths import Path  # noqa: E402
from hpctrain.watch import Record  # noqa: E402
from hpctrain.xp import finish  # noqa: E402

#: Short, long, and as long as a piece of a bucket: MPIs take another way for each.
SIZES = (1, 1 << 16, 1 << 24)
ROUNDS = 8
HEARD_S = 0.3  # srun drops what was said when it kills a step: a crash must not come right after it
#: Lengths at which both ways are timed, from a vote to a long bucket.
TIMED = tuple(1 << i for i in (10, 14, 18, 20, 22, 25))
LONG, LONG_ROUNDS = 1 << 22, 3  #: from so many bytes on fewer are sent: a wire may be slow
TO_DEVICE, TO_HOST, ANYWHERE = 1, 2, 4  # kinds of cudaMemcpy


class Buffer:
    """Memory of the GPU, from an allocation of its own: IPC handles stand for whole allocations."""

    def __init__(self, runtime: Any, nbytes: int):
        """Allocate it."""
        self._runtime, self.nbytes, self.pointer = runtime, nbytes, runtime.malloc(nbytes)

    def write(self, x: np.ndarray) -> None:
        """Fill the beginning with `x`."""
        self._runtime.memcpy(self.pointer, x.ctypes.data, x.nbytes, TO_DEVICE)
        self._runtime.deviceSynchronize()

    def read(self, nbytes: int) -> np.ndarray:
        """Return the beginning, uint8."""
        x = np.empty(nbytes, np.uint8)
        self._runtime.deviceSynchronize()
        self._runtime.memcpy(x.ctypes.data, self.pointer, nbytes, TO_HOST)
        return x

    def message(self, nbytes: int) -> list:
        """Return the beginning as MPI takes it: by its pointer."""
        return [MPI.memory.fromaddress(self.pointer, nbytes), nbytes, MPI.BYTE]


def main() -> None:
    """Run the stages; rank 0 speaks."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its core is not wanted
    launched, numbers = launchers.launched(os.environ), sys.argv[1].split(",")
    runtime = _taken(int(numbers[launched.rank]))
    MPI.Init_thread(MPI.THREAD_MULTIPLE)  # as the run does: MPIs take other ways without
    comm = MPI.COMM_WORLD
    if comm.size != 2:
        sys.exit(f"expected a job of 2 ranks, this one has {comm.size}")
    # Slurm may have several nodes on one machine.
    hosts = comm.allgather(os.environ.get("SLURMD_NODENAME") or MPI.Get_processor_name())
    _say(comm, "started", claims=asdict(_claims(comm)), hosts=hosts)
    mine, inbox = Buffer(runtime, max(SIZES)), Buffer(runtime, max(SIZES))
    if hosts[0] == hosts[1]:
        _say(comm, "ipc", **by_ipc(comm, runtime, mine, inbox))
    link = mpi.MpiLink(comm.Dup(), Record(None, comm.rank, comm.size).entry("main"))
    cupy = gpus.cupy_module()
    _say(comm, "staged", seconds=messages(link, cupy, ["staged"]))
    time.sleep(HEARD_S)
    found = by_pointer(comm, mine, inbox)
    _say(comm, "pointer", **found)
    if found["right"]:
        _say(comm, "sizes", seconds=messages(link, cupy, ["staged", "cuda-aware"]))
    comm.Barrier()
    MPI.Finalize()


def by_ipc(comm: MPI.Comm, runtime: Any, mine: Buffer, inbox: Buffer) -> dict[str, Any]:
    """Copy the other rank's memory into `inbox`; return whether it was right, GB/s, what failed."""
    mine.write(pattern(comm.rank, mine.nbytes))
    why, seconds, right = "", float("inf"), False
    handles = comm.allgather(_handle(runtime, mine))
    if refused := [one for one in handles if isinstance(one, str)]:
        return {"right": False, "gb_s": 0.0, "why": refused[0]}
    try:
        theirs = runtime.ipcOpenMemHandle(handles[1 - comm.rank])
        copy = lambda: _copy(runtime, inbox.pointer, theirs, mine.nbytes)  # noqa: E731
        seconds = best(copy)
        right = bool((inbox.read(mine.nbytes) == pattern(1 - comm.rank, mine.nbytes)).all())
    except runtime.CUDARuntimeError as error:
        why = str(error)
    everyone = comm.allgather((right, why))  # nobody gives its memory back before
    if right:
        runtime.ipcCloseMemHandle(theirs)
    return _outcome(everyone, mine.nbytes / seconds)


def by_pointer(comm: MPI.Comm, mine: Buffer, inbox: Buffer) -> dict[str, Any]:
    """Exchange by pointers; return whether all was right, GB/s one way, what MPI said."""
    why, right, seconds = "", True, float("inf")
    try:
        for nbytes in SIZES:
            mine.write(pattern(comm.rank, nbytes))
            inbox.write(np.zeros(nbytes, np.uint8))
            _exchange(comm, mine.message(nbytes), inbox.message(nbytes))
            right &= bool((inbox.read(nbytes) == pattern(1 - comm.rank, nbytes)).all())
        seconds = best(lambda: _one_way(comm, mine, inbox))
    except MPI.Exception as error:
        why, right = str(error), False
    return _outcome(comm.allgather((right, why)), max(SIZES) / seconds)


def messages(
    link: Link, cupy: Any, paths: Sequence[Path], sizes: Sequence[int] = TIMED
) -> list[tuple[int | float, ...]]:
    """Return for each of `sizes` the bytes, and the seconds of a message on each of `paths`.

    Paths take turns, each at its best: half of a message there and back.
    """
    ways: dict[Path, dict[int, float]] = {path: {} for path in paths}
    x = cupy.zeros(max(sizes), np.uint8)
    turns = [(i, path) for i in range(ROUNDS) for path in paths]
    for i, path in turns:
        link.take([path] * link.size)
        found = ways[path]
        for nbytes in (n for n in sizes if n < LONG or i < LONG_ROUNDS):
            start = time.perf_counter()
            _there_and_back(link, x[:nbytes])
            found[nbytes] = min(found.get(nbytes, math.inf), time.perf_counter() - start)
    return [(n, *(found[n] / 2 for found in ways.values())) for n in sizes]


def _there_and_back(link: Link, x: Any) -> None:
    other = 1 - link.rank
    if link.rank == 0:
        link.isend(x, other).wait()
    link.irecv(x, other).wait()
    if link.rank == 1:
        link.isend(x, other).wait()
    finish(x)


def best(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest of some calls."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _taken(ordinal: int) -> Any:
    """Make the GPU current before MPI starts; return CUDA's runtime."""
    gpus.use(ordinal)
    return gpus.runtime()


def _claims(comm: MPI.Comm) -> claims.Claims:
    mpi = probe.loaded_mpi()
    kinds = comm.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return claims.asked(mpi.vendor, mpi.libmpi, kinds)


def _handle(runtime: Any, buffer: Buffer) -> bytes | str:
    """Return the handle, or in words why there is none."""
    try:
        handle: bytes = runtime.ipcGetMemHandle(buffer.pointer)
    except runtime.CUDARuntimeError as error:
        return str(error)
    return handle


def _copy(runtime: Any, to: int, source: int, nbytes: int) -> None:
    runtime.memcpy(to, source, nbytes, ANYWHERE)
    runtime.deviceSynchronize()


def _exchange(comm: MPI.Comm, out: list, into: list) -> None:
    peer = 1 - comm.rank
    comm.Sendrecv(out, peer, 0, into, peer, 0)


def _one_way(comm: MPI.Comm, mine: Buffer, inbox: Buffer) -> None:
    if comm.rank == 0:
        comm.Send(mine.message(max(SIZES)), 1)
    else:
        comm.Recv(inbox.message(max(SIZES)), 0)
    comm.Barrier()


def _outcome(everyone: list[tuple[bool, str]], rate: float) -> dict[str, Any]:
    right = all(fine for fine, _ in everyone)
    why = next((said for _, said in everyone if said), "" if right else "other bytes arrived")
    return {"right": right, "gb_s": rate / 1e9, "why": why}


def _say(comm: MPI.Comm, stage: str, **found: Any) -> None:
    if comm.rank == 0:
        print(json.dumps({"stage": stage, **found}), flush=True)


if __name__ == "__main__":
    main()
