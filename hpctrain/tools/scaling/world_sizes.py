"""The sizes of a study: numbers of ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pydantic

from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import units

PositiveInt = Annotated[int, pydantic.Field(ge=1, le=1 << 60)]


@dataclass(frozen=True, order=True)
class Size:
    """`ranks` ranks in total, evenly distributed over `nodes` nodes."""

    ranks: PositiveInt
    nodes: PositiveInt = 1

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def name(self) -> str:
        """The name of the size's folder."""
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


def parse_sizes(
    ranks: str | None, nodes: str | None, per_node: int | None, platform: str
) -> list[Size]:
    """Return the sizes that `--ranks`, `--nodes` and `--ranks-per-node` ask for, ascending.

    Only `--nodes`: each node has `per_node` (default 1) ranks. Only `--ranks`: one node locally,
    elsewhere as few nodes as possible with `per_node` (default 1) ranks each. Both: pairs, or one
    number of nodes for all sizes. Raises UsageError if the nodes do not divide the ranks.
    """
    if per_node is not None and per_node < 1:
        raise UsageError(f"--ranks-per-node: expected 1 or more, seen {per_node}")
    if not ranks and not nodes:
        raise UsageError("scale needs sizes: --ranks 1,2,4 or --nodes 1,2,4")
    if platform == "local" and nodes:
        raise UsageError(
            "--nodes: this machine is one node; use --ranks, or --on netlab or --on slurm"
        )
    node_counts = units.parse_counts(nodes, "--nodes") if nodes else []
    if not ranks:
        return [Size(count * (per_node or 1), count) for count in node_counts]
    rank_counts = units.parse_counts(ranks)
    if platform == "local":
        return [Size(count) for count in rank_counts]
    return _sizes_over_nodes(rank_counts, node_counts, per_node)


def _sizes_over_nodes(
    ranks: Sequence[int], nodes: Sequence[int], per_node: int | None
) -> list[Size]:
    if not nodes:
        return [_make_size(count, -(-count // (per_node or 1))) for count in ranks]
    if per_node is not None:
        raise UsageError("--ranks-per-node follows from --ranks and --nodes: leave it out")
    if len(nodes) not in (1, len(ranks)):
        raise UsageError(
            f"--nodes: expected one number, or one for each of {len(ranks)} --ranks, "
            f"seen {len(nodes)}"
        )
    pairs = zip(ranks, nodes if len(nodes) > 1 else [*nodes] * len(ranks), strict=True)
    return [_make_size(*ranks_and_nodes) for ranks_and_nodes in pairs]


def _make_size(ranks: int, nodes: int) -> Size:
    if ranks % nodes:
        lower_multiple = ranks // nodes * nodes
        valid_counts = (
            f"{lower_multiple} or {lower_multiple + nodes}" if lower_multiple else f"{nodes}"
        )
        raise UsageError(
            f"{ranks} ranks on {nodes} nodes: expected as many ranks on each, seen "
            f"{ranks / nodes:.3g}; take {valid_counts} ranks"
        )
    return Size(ranks, nodes)


def ranks_per_core(size: Size, cores: int | None, threads: int) -> float:
    """Return the number of ranks per core: above 1 if the ranks' `threads` exceed `cores`.

    All nodes of a netlab share the cores of one machine. `cores` is None if nodes have their own.
    """
    return 1.0 if cores is None else max(1.0, size.ranks * threads / cores)
