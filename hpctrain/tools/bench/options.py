"""Options that several benchmarks share, and their checks; validation needs no MPI.

Before allocation it is checked that buffers fit into memory: otherwise the kernel kills ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hpctrain.core.errors import UsageError
from hpctrain.hardware.memory import available_bytes
from hpctrain.hardware.pci import ROOT
from hpctrain.tools.bench.units import size_text
from hpctrain.transport.device import gpus
from hpctrain.world import World

MATPLOTLIB_HINT = "--plot needs matplotlib; run: pip install 'hpctrain[report]'"
OWN_BUFFERS = 3  #: the buffer to reduce, and two buffers of the roofline
RIVAL_BUFFERS = 2  #: copies made by other libraries


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every benchmark is asked for: rounds, other libraries, and the files that it writes."""

    iterations: int  #: timed rounds
    warm_up: int  #: untimed rounds before them
    json: Path | None
    plot: Path | None
    rivals: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for numbers that are too small, and a `plot` that cannot be drawn."""
        require_minimum("--iterations", self.iterations, 1)
        require_minimum("--warm-up", self.warm_up, 0)
        check_plot_path(self.plot)


def split_words(text: str) -> Iterable[str]:
    """Return the comma-separated words of `text` without duplicates."""
    return dict.fromkeys(word.strip() for word in text.split(",") if word.strip())


def require_minimum(flag: str, number: int, minimum: int) -> None:
    """Raise UsageError if `number` is less than `minimum`."""
    if number < minimum:
        raise UsageError(f"{flag}: expected at least {minimum}, seen {number}")


def check_plot_path(plot: Path | None) -> None:
    """Raise UsageError if `plot` has another suffix than .png or .svg, or without matplotlib."""
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot: expected a name that ends in .png or .svg, seen '{plot}'")
    try:
        import_module("hpctrain.tools.bench.plot")
    except ImportError as error:
        raise UsageError(f"{MATPLOTLIB_HINT} ({error})") from None


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
