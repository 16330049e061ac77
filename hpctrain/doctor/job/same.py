"""Whoever differs from the others; and what all nodes found about themselves, as one row each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hpctrain.doctor.check import VERDICTS, Check
from hpctrain.doctor.job.hosts import listed
from hpctrain.doctor.job.told import REFUSED, Told
from hpctrain.transport.seats import named

SHOWN = 4  # groups of nodes in one row
INSTALL = "let all nodes use one environment: activate it in the job script, or install it anew"
COPY = "give all ranks one file: a folder that all nodes see, and an absolute path"


def versions(told: Sequence[Told], hosts: Sequence[str]) -> Check:
    """Return the check that all ranks have the same Python, packages and MPI."""
    names = list(dict.fromkeys(name for one in told for name in one.versions))
    of = {name: [one.versions.get(name, "none") for one in told] for name in names}
    wrong = {name: found for name, found in of.items() if len(set(found)) > 1}
    if not wrong:
        return Check("versions", "ok", ", ".join(f"{name} {of[name][0]}" for name in names))
    seen = "; ".join(f"{name}: {_told(found, hosts)}" for name, found in wrong.items())
    odd = sorted({rank for found in wrong.values() for rank in others(found)})
    return Check("versions", "bad", seen, INSTALL, _nodes(odd, hosts))


def recipe(told: Sequence[Told], hosts: Sequence[str]) -> list[Check]:
    """Return the check that all ranks read the same recipe; none where no recipe was named."""
    found = [one.recipe for one in told]
    if not any(found):
        return []
    if len(set(found)) > 1:
        short = [one if one.startswith(REFUSED) else one[:12] for one in found]
        return [Check("recipe", "bad", _told(short, hosts), COPY, _nodes(others(found), hosts))]
    if found[0].startswith(REFUSED):
        return [Check("recipe", "bad", found[0], "correct it, or name another with --recipe")]
    return [Check("recipe", "ok", f"SHA-256 {found[0][:12]} on all ranks")]


def machines(told: Sequence[Told], hosts: Sequence[str]) -> list[Check]:
    """Return the fault of a name that several machines have: their ranks share no memory."""
    kernels: dict[str, set[str]] = {host: set() for host in hosts}
    for one, host in zip(told, hosts, strict=True):
        kernels[host].add(one.kernel)
    twice = [host for host, found in kernels.items() if len(found) > 1]
    if not twice:
        return []
    seen = f"{listed(twice)} is the name of {max(len(kernels[host]) for host in twice)} machines"
    return [Check("host names", "bad", f"{seen}: their ranks take each other for neighbours",
                  "give each machine, or container, its own hostname")]  # fmt: skip


def others(found: Sequence[str]) -> list[int]:
    """Return the ranks that differ from most; from rank 0 where no value has more."""
    usual = Counter(found).most_common(1)[0][0]
    return [rank for rank, one in enumerate(found) if one != usual]


def merged(found: Mapping[str, Sequence[Check]]) -> list[Check]:
    """Return a row per name of the checks that nodes made, each with the worst verdict."""
    names = dict.fromkeys(check.name for checks in found.values() for check in checks)
    by_name = {
        name: {node: c for node, checks in found.items() for c in checks if c.name == name}
        for name in names
    }
    return [_row(checks, len(found)) for checks in by_name.values()]


def _row(checks: Mapping[str, Check], nodes: int) -> Check:
    worst = max((check.verdict for check in checks.values()), key=VERDICTS.index)
    groups: dict[tuple[str, str], list[str]] = {}
    for node, check in checks.items():
        if check.verdict == worst:
            groups.setdefault((check.seen, check.remedy), []).append(node)
    (first, remedy), *more = groups
    name, blamed = next(iter(checks.values())).name, [n for g in groups.values() for n in g]
    if worst in ("ok", "note") or (not more and len(blamed) == nodes):
        return Check(name, worst, first + f"; {len(more)} more like it" * bool(more), remedy)
    seen = "; ".join(
        f"{listed(group)}: {seen}" for (seen, _), group in list(groups.items())[:SHOWN]
    )
    seen += f"; and {len(groups) - SHOWN} more" * (len(groups) > SHOWN)
    return Check(name, worst, seen, remedy, tuple(blamed))


def _told(found: Sequence[str], hosts: Sequence[str]) -> str:
    odd = others(found)
    usual = next(one for rank, one in enumerate(found) if rank not in odd)
    values: dict[str, list[int]] = {}
    for rank in odd:
        values.setdefault(found[rank], []).append(rank)
    differ = [f"{named(ranks)} on {listed(hosts[r] for r in ranks)} {_has(ranks)} {value}"
              for value, ranks in list(values.items())[:SHOWN]]  # fmt: skip
    return f"{usual}, but {', '.join(differ)}"


def _has(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _nodes(ranks: Sequence[int], hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hosts[rank] for rank in ranks))
