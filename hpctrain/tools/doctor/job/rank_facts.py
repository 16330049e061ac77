"""Facts of each rank: versions, recipe, MPI; the first rank of a node adds facts of the node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.tools.doctor import examine
from hpctrain.tools.doctor.check import Check
from hpctrain.training import recipe
from hpctrain.training.timeline import kernel
from hpctrain.transport import machine
from hpctrain.transport.gpu_probe import verdicts
from hpctrain.world import World

REFUSED_PREFIX = "refused: "


@dataclass(frozen=True)
class RankFacts:
    """A rank's facts; some must be equal on all ranks."""

    versions: Mapping[str, str]
    recipe: str  #: the hash of the recipe, or the reason of its refusal; "" without a recipe
    threads: str  #: thread level that MPI grants, such as "MULTIPLE"
    ulfm: bool
    kernel: str  #: identifies the machine independently of its hostname
    checks: tuple[Check, ...] = ()  #: of the node; only from its first rank
    topology_lines: tuple[str, ...] = ()  #: the topology of the node as text
    hardware: Mapping[str, Any] = field(default_factory=dict)


def collect_local_facts(world: World, recipe_name: str | None) -> RankFacts:
    """Return the facts of this rank."""
    from hpctrain.transport.mpi import fault_tolerance, hello

    return RankFacts(
        {**machine.versions(), "cupy": examine.cupy_version() or "none", "MPI": machine.mpi()},
        _hash_recipe(recipe_name),
        hello.thread_level(),
        fault_tolerance.has_ulfm(),
        kernel(),
        **(_collect_node_facts(world.host) if is_first_of_node(world) else {}),
    )


def is_first_of_node(world: World) -> bool:
    """Return whether this rank is the first of its node."""
    return world.hosts.index(world.host) == world.rank


def _collect_node_facts(host: str) -> dict[str, Any]:
    hardware = examine.find_hardware(host)
    gpu_paths = verdicts.cached_result(os.environ) if hardware.node_gpus.gpus else None
    checks = tuple(examine.check_node(hardware, gpu_paths))
    return {
        "checks": checks,
        "topology_lines": tuple(hardware.topology_lines),
        "hardware": hardware.table(),
    }


def facts_from_table(table: Mapping[str, Any]) -> RankFacts:
    """Return the facts from a table that `asdict` made and JSON transported."""
    checks = tuple(Check(**{**row, "nodes": tuple(row["nodes"])}) for row in table["checks"])
    return RankFacts(
        **{**table, "checks": checks, "topology_lines": tuple(table["topology_lines"])}
    )


def _hash_recipe(recipe_name: str | None) -> str:
    try:
        return recipe.load(recipe_name).sha256 if recipe_name else ""
    except UsageError as error:
        return f"{REFUSED_PREFIX}{error}"
