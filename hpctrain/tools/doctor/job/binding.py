"""The binding map: host, cores, GPU and NIC of every rank; the faults of this placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hpctrain.core.launchers import TITLES
from hpctrain.core.names import format_ranks
from hpctrain.hardware.pci import parse_core_list
from hpctrain.tools.doctor.check import Check, Verdict
from hpctrain.transport.placement.check import (
    MAX_FAULTS_SHOWN,
    RankBinding,
    describe_faults,
    find_faults,
    group_by_kind,
    unbind_advice,
)
from hpctrain.transport.placement.nearest_nics import NEAR_VALUE, NIC_VARIABLE, UCX_RAILS

COLUMNS = ("rank", "host", "local rank", "cores", "BLAS threads", "GPU", "NIC")
#: Placement faults: a bad one makes a run many times slower, or ends it.
FAULT_VERDICTS: dict[str, Verdict] = {
    "local ranks": "bad",
    "GPUs shared": "bad",
    "cores shared": "bad",
    "BLAS threads": "bad",
    "NICs named": "bad",
    "NICs shared": "slow",
    "NICs far": "slow",
}


def binding_rows(bindings: Sequence[RankBinding]) -> list[tuple[str, ...]]:
    """Return a row of cells per rank, under the headings `COLUMNS`."""
    last_local_rank: dict[str, int] = {}
    rows = []
    for rank, binding in enumerate(bindings):
        local_rank = last_local_rank[binding.host] = last_local_rank.get(binding.host, -1) + 1
        cells = (
            rank,
            binding.host,
            local_rank,
            binding.cores,
            binding.blas_threads,
            binding.gpu,
            binding.nics.label,
        )
        rows.append(tuple(str(cell) or "-" for cell in cells))
    return rows


def check_bindings(bindings: Sequence[RankBinding]) -> list[Check]:
    """Return the checks of the placement: a row per kind of fault, else of cores, GPUs and NICs."""
    rank_faults = find_faults(bindings)
    checks = [_check_launcher(bindings)]
    for fault_group in group_by_kind(rank_faults):
        name = fault_group[0].name
        checks.append(Check(name, FAULT_VERDICTS[name], *describe_faults(fault_group)))
    if not any(fault.name in ("cores shared", "BLAS threads") for fault in rank_faults):
        checks.append(_check_shared_cores(bindings))
    has_shared_gpus = any(fault.name == "GPUs shared" for fault in rank_faults)
    if any(binding.gpu for binding in bindings) and not has_shared_gpus:
        checks.append(_check_shared_gpus(bindings))
    if not any(fault.name.startswith("NICs") for fault in rank_faults):
        checks += _check_near_nics(bindings)
    return checks


def _join_texts(texts: Sequence[str]) -> str:
    suffix = f"; and {len(texts) - MAX_FAULTS_SHOWN} more" * (len(texts) > MAX_FAULTS_SHOWN)
    return "; ".join(texts[:MAX_FAULTS_SHOWN]) + suffix


def is_oversubscribed(bindings: Sequence[RankBinding]) -> bool:
    """Return whether any ranks share fewer cores than there are ranks."""
    return any(
        len(ranks) > len(parse_core_list(cores))
        for ranks, cores, _ in _ranks_by_value(bindings, "cores")
    )


def _check_launcher(bindings: Sequence[RankBinding]) -> Check:
    launcher_names = list(dict.fromkeys(TITLES[binding.launcher] for binding in bindings))
    node_count = len({binding.host for binding in bindings})
    observed = f"{len(bindings)} rank{'s' * (len(bindings) > 1)} "
    observed += f"on {node_count} node{'s' * (node_count > 1)}, by {' and '.join(launcher_names)}"
    if len(bindings) > 1:
        return Check("ranks", "ok", observed)
    return Check("ranks", "note", f"{observed}: start as many ranks as the training will have",
                 "srun, mpirun or hpctrain launch -n N")  # fmt: skip


def _check_shared_cores(bindings: Sequence[RankBinding]) -> Check:
    """Return the check of ranks that share cores on nodes without idle cores."""
    groups = list(_ranks_by_value(bindings, "cores"))
    if not groups:
        return Check("cores", "ok", "every rank has its own")
    observed = _join_texts([
        f"{format_ranks(ranks)} of {host} share {len(parse_core_list(cores))} cores"
        for ranks, cores, host in groups
    ])  # fmt: skip
    if is_oversubscribed(bindings):
        return Check("cores", "slow", f"{observed}: they take turns", "start fewer ranks per node")
    remedy = unbind_advice(bindings[0].launcher)
    return Check("cores", "note", f"{observed}: ranks are not bound", remedy)


def _check_shared_gpus(bindings: Sequence[RankBinding]) -> Check:
    """Return the check of ranks that share a GPU on nodes without idle GPUs."""
    groups = _ranks_by_value(bindings, "gpu")
    texts = [f"{format_ranks(ranks)} of {host} share {gpu}" for ranks, gpu, host in groups if gpu]
    if texts:
        return Check(
            "GPUs", "note", _join_texts(texts), "start as many ranks per node as it has GPUs"
        )
    return Check("GPUs", "ok", "every rank has its own")


def _check_near_nics(bindings: Sequence[RankBinding]) -> list[Check]:
    """Return the check of ranks that are equally near to many ports; [] on one node.

    If there are more such ports than UCX uses at once, UCX selects the same ones for all ranks.
    """
    is_one_node = len({binding.host for binding in bindings}) < 2
    if is_one_node or all(len(binding.nics.ports) < 2 for binding in bindings):
        return []
    texts = [
        f"{format_ranks(ranks)} of {host} are equally near {len(nics.nearest)} ports"
        for ranks, nics, host in _ranks_by_value(bindings, "nics")
        if len(nics.nearest) > UCX_RAILS and not nics.named
    ]
    if texts:
        observed = f"{_join_texts(texts)}: UCX may give all of them the same {UCX_RAILS}"
        return [
            Check(
                "NICs",
                "note",
                observed,
                f"export {NIC_VARIABLE}={NEAR_VALUE}: ranks share the ports out",
            )
        ]
    return [Check("NICs", "ok", "the map shows the ports near each rank")]


def _ranks_by_value(
    bindings: Sequence[RankBinding], attribute: str
) -> Iterator[tuple[list[int], Any, str]]:
    """Yield groups of ranks on a node with the same `attribute`: ranks, value, node."""
    keys = [(binding.host, getattr(binding, attribute)) for binding in bindings]
    for key in dict.fromkeys(keys):
        ranks = [rank for rank, rank_key in enumerate(keys) if rank_key == key]
        if len(ranks) > 1:
            yield ranks, key[1], key[0]
