"""Check before allocation that buffers fit into memory: else the kernel kills ranks."""

from __future__ import annotations

from pathlib import Path

from hpctrain.bench.message_sizes import shown
from hpctrain.core.errors import UsageError
from hpctrain.hardware.memory import available_bytes
from hpctrain.hardware.pci import ROOT
from hpctrain.transport.device import gpus
from hpctrain.world import World

OWN_BUFFERS = 3  #: the buffer to reduce, and the two of the floor
RIVALS_BUFFERS = 2  #: copies made by other libraries


def check(world: World, longest: int, rivals: bool, root: Path = ROOT) -> None:
    """Raise UsageError on all ranks if buffers of `longest` bytes do not fit; collective."""
    world.together(lambda: _check(world, longest, rivals, root))


def _check(world: World, longest: int, rivals: bool, root: Path) -> None:
    ranks = world.hosts.count(world.host)
    need = longest * (OWN_BUFFERS + RIVALS_BUFFERS * rivals)
    free = available_bytes(root)
    if free is not None and ranks * need > free:
        raise UsageError(
            f"--sizes: {shown(longest)} needs {_gib(need)} in each of {ranks} ranks on "
            f"{world.host}, {_gib(ranks * need)} in all, but only {_gib(free)} are available; "
            f"take at most {shown(free // (ranks * (need // longest)) >> 20 << 20)}, or fewer ranks"
        )


def check_gpu(world: World, longest: int, need: int) -> None:
    """Raise UsageError on all ranks if one has no GPU or too little GPU memory; collective.

    Buffers of `longest` bytes need `need` bytes of each rank.
    """
    world.together(lambda: _check_gpu(world, longest, need))


def _check_gpu(world: World, longest: int, need: int) -> None:
    place = world.places[world.rank]
    if not place.gpu:
        raise UsageError(
            "--device gpu: expected a GPU for every rank, seen none; look at `hpctrain doctor`"
        )
    ranks, free = world.places.count(place), gpus.free_bytes()
    if ranks * need > free:
        raise UsageError(
            f"--sizes: {shown(longest)} needs {_gib(need)} in each of {ranks} ranks on {place.gpu} "
            f"of {place.node}, of which {_gib(free)} are free; take shorter ones, or fewer ranks"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
