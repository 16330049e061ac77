"""Consistency: ranks and clocks that differ; the checks of all nodes merged by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import VERDICTS, Check, node_list
from hpctrain.doctor.job.rank_facts import REFUSAL_PREFIX, RankFacts
from hpctrain.training.timeline import clock_offset
from hpctrain.transport.placement.check import named
from hpctrain.watch.trace import Reading
from hpctrain.world import World

NOTE_SKEW_S, SLOW_SKEW_S = 0.1, 1.0
MAX_GROUPS_SHOWN = 4  # groups of nodes in one row
INSTALL = "let all nodes use one environment: activate it in the job script, or install it anew"
COPY_REMEDY = "give all ranks one file: a folder that all nodes see, and an absolute path"


def versions(facts: Sequence[RankFacts], hosts: Sequence[str]) -> Check:
    """Return the check that all ranks have the same Python, packages and MPI."""
    names = list(dict.fromkeys(name for rank_facts in facts for name in rank_facts.versions))
    values_by_name = {
        name: [rank_facts.versions.get(name, "none") for rank_facts in facts] for name in names
    }
    differing = {name: values for name, values in values_by_name.items() if len(set(values)) > 1}
    if not differing:
        return Check(
            "versions", "ok", ", ".join(f"{name} {values_by_name[name][0]}" for name in names)
        )
    observed = "; ".join(
        f"{name}: {_difference(values, hosts)}" for name, values in differing.items()
    )
    minority_ranks = sorted({rank for values in differing.values() for rank in odd_ranks(values)})
    return Check("versions", "bad", observed, INSTALL, _nodes(minority_ranks, hosts))


def recipe(facts: Sequence[RankFacts], hosts: Sequence[str]) -> list[Check]:
    """Return the check that all ranks read the same recipe; none where no recipe was named."""
    recipes = [rank_facts.recipe for rank_facts in facts]
    if not any(recipes):
        return []
    if len(set(recipes)) > 1:
        short_hashes = [text if text.startswith(REFUSAL_PREFIX) else text[:12] for text in recipes]
        nodes = _nodes(odd_ranks(recipes), hosts)
        return [Check("recipe", "bad", _difference(short_hashes, hosts), COPY_REMEDY, nodes)]
    if recipes[0].startswith(REFUSAL_PREFIX):
        return [Check("recipe", "bad", recipes[0], "correct it, or name another with --recipe")]
    return [Check("recipe", "ok", f"SHA-256 {recipes[0][:12]} on all ranks")]


def machines(facts: Sequence[RankFacts], hosts: Sequence[str]) -> list[Check]:
    """Return the fault of a hostname that several machines have: their ranks share no memory."""
    kernels: dict[str, set[str]] = {host: set() for host in hosts}
    for rank_facts, host in zip(facts, hosts, strict=True):
        kernels[host].add(rank_facts.kernel)
    repeated_hosts = [host for host, names in kernels.items() if len(names) > 1]
    if not repeated_hosts:
        return []
    count = max(len(kernels[host]) for host in repeated_hosts)
    observed = f"{node_list(repeated_hosts)} is the name of {count} machines"
    return [Check("host names", "bad", f"{observed}: their ranks take each other for neighbours",
                  "give each machine, or container, its own hostname")]  # fmt: skip


def odd_ranks(values: Sequence[str]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; of equals, the first counts."""
    majority = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != majority]


def merged(by_node: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Return one check per name from the checks of all nodes, with the worst verdict."""
    names = dict.fromkeys(check.name for checks in by_node.values() for check in checks)
    by_name = {
        name: {node: c for node, checks in by_node.items() for c in checks if c.name == name}
        for name in names
    }
    return [_row(checks, len(by_node)) for checks in by_name.values()]


def _row(checks: Mapping[str, Check], nodes: int) -> Check:
    worst_verdict = max((check.verdict for check in checks.values()), key=VERDICTS.index)
    groups: dict[tuple[str, str], list[str]] = {}
    for node, check in checks.items():
        if check.verdict == worst_verdict:
            groups.setdefault((check.seen, check.remedy), []).append(node)
    (first, remedy), *rest = groups
    name, blamed = next(iter(checks.values())).name, [n for g in groups.values() for n in g]
    if worst_verdict in ("ok", "note") or (not rest and len(blamed) == nodes):
        return Check(
            name, worst_verdict, first + f"; {len(rest)} more like it" * bool(rest), remedy
        )
    observed = "; ".join(
        f"{node_list(group)}: {observed}"
        for (observed, _), group in list(groups.items())[:MAX_GROUPS_SHOWN]
    )
    observed += f"; and {len(groups) - MAX_GROUPS_SHOWN} more" * (len(groups) > MAX_GROUPS_SHOWN)
    return Check(name, worst_verdict, observed, remedy, tuple(blamed))


def _difference(values: Sequence[str], hosts: Sequence[str]) -> str:
    minority_ranks = odd_ranks(values)
    majority = next(value for rank, value in enumerate(values) if rank not in minority_ranks)
    ranks_of: dict[str, list[int]] = {}
    for rank in minority_ranks:
        ranks_of.setdefault(values[rank], []).append(rank)
    differ = [f"{named(ranks)} on {node_list(hosts[r] for r in ranks)} {_verb_for(ranks)} {value}"
              for value, ranks in list(ranks_of.items())[:MAX_GROUPS_SHOWN]]  # fmt: skip
    return f"{majority}, but {', '.join(differ)}"


def _verb_for(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _nodes(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts[rank] for rank in ranks))


def clock_reading(world: World, kernels: Sequence[str]) -> Reading:
    """Return the offset of this rank's clock behind rank 0's; collective.

    The first rank on each kernel measures; `kernels` are those of all ranks.
    """
    firsts = {kernels.index(name) for name in kernels if name != kernels[0]}
    return clock_offset(world.link, sorted(firsts), time.time)


def clocks(behind_s: Mapping[str, Reading]) -> Check:
    """Return the check of the nodes' clocks."""
    worst_node = max(behind_s, key=lambda node: abs(behind_s[node].offset_s))
    largest = behind_s[worst_node]
    skew = abs(largest.offset_s)
    if len(behind_s) == 1 or skew <= NOTE_SKEW_S:
        observed = f"apart by {skew * 1e3:.1f} ms at most (+- {largest.uncertainty_s * 1e3:.1f})"
        return Check("clocks", "ok", observed)
    word = "behind" if largest.offset_s > 0 else "ahead of"
    observed = f"{worst_node} is {skew:.1f} s {word} rank 0's node"
    skewed_nodes = tuple(
        node for node, clock in behind_s.items() if abs(clock.offset_s) > SLOW_SKEW_S
    )
    remedy = "ask the site for chrony or ntpd on it: timedatectl"
    observed += ": logs and file times mislead"
    return Check("clocks", "slow" if skewed_nodes else "note", observed, remedy, skewed_nodes)
