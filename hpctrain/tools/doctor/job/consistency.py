"""Facts of each rank, and whether they agree: versions, recipe, clocks; the checks of all nodes.

The first rank of a node adds facts of the node.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.core.errors import UsageError
from hpctrain.core.names import format_ranks
from hpctrain.tools.doctor import examine
from hpctrain.tools.doctor.check import VERDICTS, Check, node_list
from hpctrain.training import recipe
from hpctrain.training.timeline import clock_offset, kernel
from hpctrain.transport import machine
from hpctrain.transport.gpu_probe import verdicts
from hpctrain.watch.trace import Reading
from hpctrain.world import World

MAX_OK_SKEW_S, MAX_NOTE_SKEW_S = 0.1, 1.0
MAX_SHOWN_GROUPS = 4  # groups of nodes in one row
INSTALL_REMEDY = (
    "let all nodes use one environment: activate it in the job script, or install it anew"
)
COPY_REMEDY = "give all ranks one file: a folder that all nodes see, and an absolute path"
REFUSED_PREFIX = "refused: "


def check_versions(facts: Sequence[RankFacts], hosts: Sequence[str]) -> Check:
    """Return the check that all ranks have the same Python, packages and MPI."""
    package_names = list(
        dict.fromkeys(name for rank_facts in facts for name in rank_facts.versions)
    )
    values_by_name = {
        name: [rank_facts.versions.get(name, "none") for rank_facts in facts]
        for name in package_names
    }
    differing_values = {
        name: values for name, values in values_by_name.items() if len(set(values)) > 1
    }
    if not differing_values:
        return Check(
            "versions",
            "ok",
            ", ".join(f"{name} {values_by_name[name][0]}" for name in package_names),
        )
    observed = "; ".join(
        f"{name}: {_describe_difference(values, hosts)}"
        for name, values in differing_values.items()
    )
    odd_ranks = sorted(
        {rank for values in differing_values.values() for rank in deviating_ranks(values)}
    )
    return Check("versions", "bad", observed, INSTALL_REMEDY, _hosts_of_ranks(odd_ranks, hosts))


def check_recipe(facts: Sequence[RankFacts], hosts: Sequence[str]) -> list[Check]:
    """Return the check that all ranks read the same recipe; [] if no recipe was named."""
    recipes = [rank_facts.recipe for rank_facts in facts]
    if not any(recipes):
        return []
    if len(set(recipes)) > 1:
        short_values = [text if text.startswith(REFUSED_PREFIX) else text[:12] for text in recipes]
        nodes = _hosts_of_ranks(deviating_ranks(recipes), hosts)
        return [
            Check("recipe", "bad", _describe_difference(short_values, hosts), COPY_REMEDY, nodes)
        ]
    if recipes[0].startswith(REFUSED_PREFIX):
        return [Check("recipe", "bad", recipes[0], "correct it, or name another with --recipe")]
    return [Check("recipe", "ok", f"SHA-256 {recipes[0][:12]} on all ranks")]


def check_host_names(facts: Sequence[RankFacts], hosts: Sequence[str]) -> list[Check]:
    """Return the fault of a hostname that several machines share; their ranks share no memory."""
    kernels: dict[str, set[str]] = {host: set() for host in hosts}
    for rank_facts, host in zip(facts, hosts, strict=True):
        kernels[host].add(rank_facts.kernel)
    ambiguous_hosts = [
        host for host, kernels_of_host in kernels.items() if len(kernels_of_host) > 1
    ]
    if not ambiguous_hosts:
        return []
    machine_count = max(len(kernels[host]) for host in ambiguous_hosts)
    observed = f"{node_list(ambiguous_hosts)} is the name of {machine_count} machines"
    return [Check("host names", "bad", f"{observed}: their ranks seem to share a node",
                  "give each machine, or container, its own hostname")]  # fmt: skip


def deviating_ranks(values: Sequence[str]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; ties go to the first value."""
    usual_value = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual_value]


def merge_checks(by_node: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Merge the nodes' checks into one check per name, with the worst verdict."""
    check_names = dict.fromkeys(check.name for checks in by_node.values() for check in checks)
    checks_by_name = {
        name: {
            node: check
            for node, checks in by_node.items()
            for check in checks
            if check.name == name
        }
        for name in check_names
    }
    return [_merge_check(checks, len(by_node)) for checks in checks_by_name.values()]


def _merge_check(checks: Mapping[str, Check], nodes: int) -> Check:
    worst_verdict = max((check.verdict for check in checks.values()), key=VERDICTS.index)
    groups: dict[tuple[str, str], list[str]] = {}
    for node, check in checks.items():
        if check.verdict == worst_verdict:
            groups.setdefault((check.seen, check.remedy), []).append(node)
    (first_observed, remedy), *other_groups = groups
    name = next(iter(checks.values())).name
    blamed_nodes = [node for group in groups.values() for node in group]
    if worst_verdict in ("ok", "note") or (not other_groups and len(blamed_nodes) == nodes):
        first_observed += f"; {len(other_groups)} more like it" * bool(other_groups)
        return Check(name, worst_verdict, first_observed, remedy)
    observed = "; ".join(
        f"{node_list(group)}: {observed}"
        for (observed, _), group in list(groups.items())[:MAX_SHOWN_GROUPS]
    )
    observed += f"; and {len(groups) - MAX_SHOWN_GROUPS} more" * (len(groups) > MAX_SHOWN_GROUPS)
    return Check(name, worst_verdict, observed, remedy, tuple(blamed_nodes))


def _describe_difference(values: Sequence[str], hosts: Sequence[str]) -> str:
    odd_ranks = deviating_ranks(values)
    usual_value = next(value for rank, value in enumerate(values) if rank not in odd_ranks)
    ranks_by_value: dict[str, list[int]] = {}
    for rank in odd_ranks:
        ranks_by_value.setdefault(values[rank], []).append(rank)
    deviations = []
    for value, ranks in list(ranks_by_value.items())[:MAX_SHOWN_GROUPS]:
        verb = "have" if len(ranks) > 1 else "has"
        nodes = node_list(hosts[rank] for rank in ranks)
        deviations.append(f"{format_ranks(ranks)} on {nodes} {verb} {value}")
    return f"{usual_value}, but {', '.join(deviations)}"


def _hosts_of_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts[rank] for rank in ranks))


def measure_clock_offset(world: World, kernels: Sequence[str]) -> Reading:
    """Return the offset of this rank's clock behind rank 0's clock; collective.

    `kernels` identifies the machine of each rank; the first rank of each machine measures.
    """
    measuring_ranks = {kernels.index(name) for name in kernels if name != kernels[0]}
    return clock_offset(world.link, sorted(measuring_ranks), time.time)


def check_clocks(readings: Mapping[str, Reading]) -> Check:
    """Return the check of the nodes' clocks."""
    worst_node = max(readings, key=lambda node: abs(readings[node].offset_s))
    largest_reading = readings[worst_node]
    skew_s = abs(largest_reading.offset_s)
    if len(readings) == 1 or skew_s <= MAX_OK_SKEW_S:
        error_s = largest_reading.uncertainty_s
        observed = f"apart by {skew_s * 1e3:.1f} ms at most (+- {error_s * 1e3:.1f})"
        return Check("clocks", "ok", observed)
    direction = "behind" if largest_reading.offset_s > 0 else "ahead of"
    observed = f"{worst_node} is {skew_s:.1f} s {direction} rank 0's node"
    wrong_nodes = tuple(
        node for node, reading in readings.items() if abs(reading.offset_s) > MAX_NOTE_SKEW_S
    )
    observed += ": logs and file times mislead"
    remedy = "ask the site for chrony or ntpd on this node: timedatectl"
    return Check("clocks", "slow" if wrong_nodes else "note", observed, remedy, wrong_nodes)


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
