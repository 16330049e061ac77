"""Facts of each rank: versions, recipe, MPI; the first rank of a node adds those of the node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain import machine
from hpctrain.core.errors import UsageError
from hpctrain.doctor import examine
from hpctrain.doctor.check import Check
from hpctrain.training import recipe
from hpctrain.training.timeline import kernel
from hpctrain.transport.gpu_probe import verdicts
from hpctrain.world import World

REFUSAL_PREFIX = "refused: "


@dataclass(frozen=True)
class RankFacts:
    """Facts that must be equal on all ranks, and facts of one rank or node."""

    versions: Mapping[str, str]
    recipe: str  #: its hash, or how it was refused; "" where none was named
    threads: str  #: thread level that MPI grants, such as "MULTIPLE"
    ulfm: bool
    kernel: str  #: identifies the machine, whatever its hostname
    checks: tuple[Check, ...] = ()  #: of the node; only from its first rank
    lines: tuple[str, ...] = ()  #: the topology of the node as text
    hardware: Mapping[str, Any] = field(default_factory=dict)


def local_facts(world: World, name: str | None) -> RankFacts:
    """Return the facts of this rank."""
    from hpctrain.transport.mpi import hello

    return RankFacts(
        {**machine.versions(), "cupy": examine.cupy() or "none", "MPI": machine.mpi()},
        _recipe(name),
        hello.level(),
        hello.ulfm(),
        kernel(),
        **(_node_facts(world.host) if is_first_of_node(world) else {}),
    )


def is_first_of_node(world: World) -> bool:
    """Return whether this rank is the first of its node."""
    return world.hosts.index(world.host) == world.rank


def _node_facts(host: str) -> dict[str, Any]:
    hardware = examine.hardware(host)
    gpu_paths = verdicts.cached_result(os.environ) if hardware.cards.cards else None
    checks = tuple(examine.node_checks(hardware, gpu_paths))
    return {"checks": checks, "lines": tuple(hardware.lines), "hardware": hardware.table()}


def from_table(table: Mapping[str, Any]) -> RankFacts:
    """Return the facts from the table of `asdict` after its way through JSON."""
    checks = tuple(Check(**{**row, "nodes": tuple(row["nodes"])}) for row in table["checks"])
    return RankFacts(**{**table, "checks": checks, "lines": tuple(table["lines"])})


def _recipe(name: str | None) -> str:
    try:
        return recipe.load(name).sha256 if name else ""
    except UsageError as error:
        return f"{REFUSAL_PREFIX}{error}"
