"""The sizes of a study: how many ranks, on how many nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pydantic

from hpctrain.bench import units
from hpctrain.core.errors import UsageError

Positive = Annotated[int, pydantic.Field(ge=1, le=1 << 60)]


@dataclass(frozen=True, order=True)
class Size:
    """`ranks` in all, as many on each of `nodes`."""

    ranks: Positive
    nodes: Positive = 1

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.ranks:05d}-ranks-{self.nodes:05d}-nodes"

    @property
    def text(self) -> str:
        """The size in words."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{nodes}"

    def scaled(self, factor: int) -> Size:
        """Return a size with `factor` times as many ranks, on as many times the nodes if several.

        A size on one node stays on that node.
        """
        return Size(self.ranks * factor, self.nodes * factor if self.nodes > 1 else 1)


def parse(ranks: str | None, nodes: str | None, per_node: int | None, on: str) -> list[Size]:
    """Return the sizes that `--ranks`, `--nodes` and `--ranks-per-node` ask for, ascending.

    `--nodes` alone has `per_node` (1) ranks on each. `--ranks` alone lies on one node locally, and
    elsewhere on as few as have room, `per_node` (1) ranks on each. Both: pairs, or one number of
    nodes for all. Raises UsageError for ranks that nodes do not divide.
    """
    if per_node is not None and per_node < 1:
        raise UsageError(f"--ranks-per-node: expected 1 or more, seen {per_node}")
    if not ranks and not nodes:
        raise UsageError("scale needs sizes: --ranks 1,2,4 or --nodes 1,2,4")
    if on == "local" and nodes:
        raise UsageError(
            "--nodes: this machine is one node; say --ranks, or --on netlab or --on slurm"
        )
    counts = units.parse_counts(nodes, "--nodes") if nodes else []
    if not ranks:
        return [Size(n * (per_node or 1), n) for n in counts]
    listed = units.parse_counts(ranks)
    if on == "local":
        return [Size(n) for n in listed]
    return _over_nodes(listed, counts, per_node)


def _over_nodes(ranks: Sequence[int], nodes: Sequence[int], per_node: int | None) -> list[Size]:
    if not nodes:
        return [_size_of(n, -(-n // (per_node or 1))) for n in ranks]
    if per_node is not None:
        raise UsageError("--ranks-per-node follows from --ranks and --nodes: leave it out")
    if len(nodes) not in (1, len(ranks)):
        raise UsageError(
            f"--nodes: expected one number, or one for each of {len(ranks)} --ranks, "
            f"seen {len(nodes)}"
        )
    pairs = zip(ranks, nodes if len(nodes) > 1 else [*nodes] * len(ranks), strict=True)
    return [_size_of(*pair) for pair in pairs]


def _size_of(ranks: int, nodes: int) -> Size:
    if ranks % nodes:
        lower_multiple = ranks // nodes * nodes
        nearest_text = (
            f"{lower_multiple} or {lower_multiple + nodes}" if lower_multiple else f"{nodes}"
        )
        raise UsageError(
            f"{ranks} ranks on {nodes} nodes: expected as many ranks on each, seen "
            f"{ranks / nodes:.3g}; take {nearest_text} ranks"
        )
    return Size(ranks, nodes)


def oversubscribed(size: Size, cores: int | None, threads: int) -> float:
    """Return the number of ranks per core: above 1 if ranks, each with `threads`, exceed `cores`.

    All nodes of a study on one machine share its cores; None for `cores` where each has its own.
    """
    return 1.0 if cores is None else max(1.0, size.ranks * threads / cores)
