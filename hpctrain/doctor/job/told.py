"""What each rank tells of itself, gathered by all; the first rank of a node tells of the node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain import machine, recipe
from hpctrain.doctor import examine
from hpctrain.doctor.check import Check
from hpctrain.errors import UsageError
from hpctrain.timeline import kernel
from hpctrain.transport import verdicts
from hpctrain.world import World

REFUSED = "refused: "


@dataclass(frozen=True)
class Told:
    """What must be the same on all ranks, and what is of interest about one."""

    versions: Mapping[str, str]
    recipe: str  #: its hash, or how it was refused; "" where none was asked for
    threads: str  #: what MPI grants, such as "MULTIPLE"
    ulfm: bool
    kernel: str  #: tells machines apart, whatever they are called
    checks: tuple[Check, ...] = ()  #: of the node; none but from its first rank
    lines: tuple[str, ...] = ()  #: the picture of the node
    hardware: Mapping[str, Any] = field(default_factory=dict)


def mine(world: World, name: str | None) -> Told:
    """Return what this rank tells."""
    from hpctrain.transport import started

    return Told(
        {**machine.versions(), "cupy": examine.cupy() or "none", "MPI": machine.mpi()},
        _recipe(name),
        started.level(),
        started.ulfm(),
        kernel(),
        **(_of_node(world.host) if first_of_node(world) else {}),
    )


def first_of_node(world: World) -> bool:
    """Return whether this rank speaks for its node."""
    return world.hosts.index(world.host) == world.rank


def _of_node(host: str) -> dict[str, Any]:
    found = examine.hardware(host)
    known = verdicts.known(os.environ) if found.cards.cards else None
    checks = tuple(examine.of_node(found, known))
    return {"checks": checks, "lines": tuple(found.lines), "hardware": found.table()}


def from_table(table: Mapping[str, Any]) -> Told:
    """Return what `asdict` made a table of, and JSON has carried."""
    checks = tuple(Check(**{**one, "nodes": tuple(one["nodes"])}) for one in table["checks"])
    return Told(**{**table, "checks": checks, "lines": tuple(table["lines"])})


def _recipe(name: str | None) -> str:
    try:
        return recipe.load(name).sha256 if name else ""
    except UsageError as error:
        return f"{REFUSED}{error}"
