"""Check before allocation that buffers fit into memory: otherwise the kernel kills ranks."""

from __future__ import annotations

from pathlib import Path

from hpctrain.core.errors import UsageError
from hpctrain.hardware.memory import available_bytes
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.bench.units import size_text
from hpctrain.transport.device import gpus
from hpctrain.world import World

OWN_BUFFERS = 3  #: the buffer to reduce, and two buffers of the roofline
RIVAL_BUFFERS = 2  #: copies made by other libraries


def check_host_memory(world: World, max_bytes: int, with_rivals: bool, root: Path = ROOT) -> None:
    """Raise UsageError on all ranks if buffers of `max_bytes` do not fit; collective."""
    world.on_all_ranks(lambda: _check_host(world, max_bytes, with_rivals, root))


def _check_host(world: World, max_bytes: int, with_rivals: bool, root: Path) -> None:
    ranks = world.hosts.count(world.host)
    needed_bytes = max_bytes * (OWN_BUFFERS + RIVAL_BUFFERS * with_rivals)
    free_bytes = available_bytes(root)
    if free_bytes is not None and ranks * needed_bytes > free_bytes:
        max_fitting_bytes = free_bytes // (ranks * (needed_bytes // max_bytes))
        raise UsageError(
            f"--sizes: {size_text(max_bytes)} needs {_gib_text(needed_bytes)} in each of {ranks} "
            f"ranks on {world.host}, {_gib_text(ranks * needed_bytes)} in all, but only "
            f"{_gib_text(free_bytes)} are available; take at most "
            f"{size_text(max_fitting_bytes >> 20 << 20)}, or fewer ranks"
        )


def check_gpu_memory(world: World, max_bytes: int, needed_bytes: int) -> None:
    """Raise UsageError on all ranks if one has no GPU or too little GPU memory; collective.

    A rank needs `needed_bytes` for its buffers of up to `max_bytes`.
    """
    world.on_all_ranks(lambda: _check_gpu(world, max_bytes, needed_bytes))


def _check_gpu(world: World, max_bytes: int, needed_bytes: int) -> None:
    place = world.places[world.rank]
    if not place.gpu:
        raise UsageError(
            "--device gpu: expected a GPU for every rank, seen none; look at `hpctrain doctor`"
        )
    ranks, free_bytes = world.places.count(place), gpus.free_gpu_bytes()
    if ranks * needed_bytes > free_bytes:
        raise UsageError(
            f"--sizes: {size_text(max_bytes)} needs {_gib_text(needed_bytes)} in each of {ranks} "
            f"ranks on {place.gpu} of {place.node}, of which {_gib_text(free_bytes)} are free; "
            "take shorter ones, or fewer ranks"
        )


def _gib_text(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
