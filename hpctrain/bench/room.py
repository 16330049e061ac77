"""Whether buffers fit into memory, looked at before they are made: a rank too many is killed."""

from __future__ import annotations

from pathlib import Path

from hpctrain.bench.sizes import shown
from hpctrain.errors import UsageError
from hpctrain.hardware.memory import available_bytes
from hpctrain.hardware.pci import ROOT
from hpctrain.transport import gpus
from hpctrain.world import World

OWN_BUFFERS = 3  #: the one that is reduced, and the two of the floor
RIVALS_BUFFERS = 2  #: what other libraries copy into


def check(world: World, longest: int, rivals: bool, root: Path = ROOT) -> None:
    """Raise UsageError on all ranks if buffers of `longest` bytes do not fit; collective."""
    world.together(lambda: _check(world, longest, rivals, root))


def _check(world: World, longest: int, rivals: bool, root: Path) -> None:
    ranks = world.hosts.count(world.host)
    each = longest * (OWN_BUFFERS + RIVALS_BUFFERS * rivals)
    free = available_bytes(root)
    if free is not None and ranks * each > free:
        raise UsageError(
            f"--sizes: {shown(longest)} needs {_gib(each)} in each of {ranks} ranks on "
            f"{world.host}, {_gib(ranks * each)} in all, but only {_gib(free)} are available; "
            f"take at most {shown(free // (ranks * (each // longest)) >> 20 << 20)}, or fewer ranks"
        )


def check_gpu(world: World, longest: int, each: int) -> None:
    """Raise UsageError on all ranks if one has no GPU or too little room there; collective.

    Buffers of `longest` bytes take `each` bytes per rank.
    """
    world.together(lambda: _check_gpu(world, longest, each))


def _check_gpu(world: World, longest: int, each: int) -> None:
    here = world.places[world.rank]
    if not here.gpu:
        raise UsageError(
            "--device gpu: expected a GPU for every rank, seen none; look at `hpctrain doctor`"
        )
    ranks, free = world.places.count(here), gpus.free_bytes()
    if ranks * each > free:
        raise UsageError(
            f"--sizes: {shown(longest)} needs {_gib(each)} in each of {ranks} ranks on {here.gpu} "
            f"of {here.node}, of which {_gib(free)} are free; take shorter ones, or fewer ranks"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
