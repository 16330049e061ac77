"""What benchmarks/compare.py merges of its runs under two MPIs, and what it claims of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.tools.bench.units import size_text

KIB = 1 << 10
NATIVES = ("native", "native-plain")
#: (part, ranks): (ours, rival, sizes from, to, geometric mean or every single one, at least); None
#: where the figure is only shown beside others.
CLAIMS: dict[tuple[str, int], list[tuple[str, str, int, int, str, float | None]]] = {
    ("allreduce", 2): [
        ("direct-shared", "native", 256 * KIB, 128 * KIB * KIB, "mean", 4.0),
        ("direct", "native", 256 * KIB, 128 * KIB * KIB, "mean", 3.0),
        ("direct-bound", "native", 8 * KIB, 8 * KIB, "each", 1.9),
        ("auto", "native", 8 * KIB, 8 * KIB, "each", None),
        ("auto-bound", "own native", 4, 128 * KIB * KIB, "each", 0.8),
        ("auto-unchecked", "own native-plain", 4, 2 * KIB, "each", 0.7),
        ("auto", "own native-plain", 4, 2 * KIB, "each", None),
        ("auto", "own native", 4, 2 * KIB, "each", None),
        ("auto", "horovod", 4, 128 * KIB * KIB, "mean", 5.0),
        ("auto", "gloo", 4, 128 * KIB * KIB, "mean", 5.0),
    ],
    ("allreduce", 4): [
        ("direct-shared", "native", 256 * KIB, 128 * KIB * KIB, "mean", 2.8),
        ("direct", "native", 256 * KIB, 128 * KIB * KIB, "mean", 2.3),
    ],
    ("private", 2): [
        ("auto-bound", "own native", 4, 128 * KIB * KIB, "each", 0.8),
        ("auto", "native", 8 * KIB * KIB, 128 * KIB * KIB, "each", 1.2),
    ],
    ("step", 2): [
        ("auto", "gloo", 32, 32, "each", 1.4),
        ("auto", "gloo", 128, 128, "each", 1.25),
        ("share-parameters", "gloo", 32, 32, "each", 1.7),
        ("share-parameters", "gloo", 128, 128, "each", 1.4),
    ],
}
EXPOSED_BATCH, EXPOSED_SHARE = 32, 1 / 3  #: batch per rank; of what each of these exposes, at most
EXPOSED_RIVALS = ("horovod", "gloo")
Row = dict[str, Any]


def merge_runs(runs: Sequence[Sequence[Row]], mpis: Sequence[str], part: str) -> list[Row]:
    """Return a row per MPI, algorithm and size: the median over runs of the medians.

    `times`: how many times faster it is than each rival, of which each is taken under the MPI
    under which it is faster, and than the native of its own MPI.
    """
    size_key = "batch_per_rank" if part == "step" else "bytes"
    rows_by_cell: dict[tuple[str, str, int], list[Row]] = {}
    for rows, mpi in zip(runs, mpis, strict=True):
        for row in rows:
            rows_by_cell.setdefault((mpi, row["algorithm"], row[size_key]), []).append(row)
    merged = [_median_row(mpi, cell_rows) for (mpi, _, _), cell_rows in rows_by_cell.items()]
    for row in merged:
        same_size = [other for other in merged if other[size_key] == row[size_key]]
        row["times"] = {
            rival: min(r["median_s"] for r in same_size if r["algorithm"] == rival)
            / row["median_s"]
            for rival in ("native", "horovod", "gloo")
            if any(r["algorithm"] == rival for r in same_size)
        }
        for native in same_size:
            if native["algorithm"] in NATIVES and native["mpi"] == row["mpi"]:
                row["times"][f"own {native['algorithm']}"] = native["median_s"] / row["median_s"]
    return merged


def _median_row(mpi: str, cell_rows: Sequence[Row]) -> Row:
    medians = [row["median_s"] for row in cell_rows]
    row = {key: cell_rows[0].get(key) for key in ("operation", "algorithm", "bytes", "ranks")}
    if "batch_per_rank" in cell_rows[0]:
        exposed = [r["exposed_s"] for r in cell_rows if r["exposed_s"] is not None]
        row["batch_per_rank"] = cell_rows[0]["batch_per_rank"]
        row["alone_s"] = float(np.median([r["alone_s"] for r in cell_rows]))
        row["exposed_s"] = float(np.median(exposed)) if exposed else None
        row["samples_per_s"] = float(np.median([r["samples_per_s"] for r in cell_rows]))
    else:
        row["busbw"] = float(np.median([r["busbw"] for r in cell_rows]))
        row["share_of_floor"] = float(np.median([r["share_of_floor"] for r in cell_rows]))
    return row | {
        "mpi": mpi,
        "runs": len(cell_rows),
        "median_s": float(np.median(medians)),
        "p5_s": min(medians),  # over runs: the fastest and the slowest
        "p95_s": max(medians),
        "correct": all(r["correct"] for r in cell_rows),
    }


def check_claims(part: str, ranks: int, merged: Sequence[Row]) -> dict[str, bool | None]:
    """Return {claim: whether it holds}, None where nothing is claimed; each under every MPI."""
    is_correct = all(row["correct"] for row in merged)
    results: dict[str, bool | None] = {f"{part}: all results are right": is_correct}
    for contender, rival, min_size, max_size, aggregate, minimum in CLAIMS.get((part, ranks), []):
        for mpi in sorted({row["mpi"] for row in merged}):
            ratios = _speed_ups(merged, part, contender, rival, mpi, min_size, max_size)
            if ratios:
                results |= _ratio_claim(
                    part, f"{contender}, {mpi}", rival, ratios, aggregate, minimum
                )
    return {**results, **(exposed_claims(merged) if part == "step" else {})}


def exposed_claims(merged: Sequence[Row]) -> dict[str, bool]:
    """Return claims of each library's step minus its own step without communication.

    A rival's is the least it has under any MPI.
    """
    batch_rows = [row for row in merged if row["batch_per_rank"] == EXPOSED_BATCH]
    results = {}
    for own_row in (row for row in batch_rows if row["algorithm"] == "auto"):
        for rival in EXPOSED_RIVALS:
            rival_exposed_s = [row["exposed_s"] for row in batch_rows if row["algorithm"] == rival]
            if rival_exposed_s:
                exposed_ratio = own_row["exposed_s"] / min(rival_exposed_s)
                results[
                    f"step: auto, {own_row['mpi']} exposes {own_row['exposed_s'] * 1e3:.2f} ms of "
                    f"communication at {EXPOSED_BATCH}, {exposed_ratio:.3f} of {rival}'s "
                    f"{min(rival_exposed_s) * 1e3:.2f} ms, <= 1/3"
                ] = own_row["exposed_s"] <= EXPOSED_SHARE * min(rival_exposed_s)
    return results


def _speed_ups(
    merged: Sequence[Row],
    part: str,
    contender: str,
    rival: str,
    mpi: str,
    min_size: int,
    max_size: int,
) -> dict[int, float]:
    size_key = "batch_per_rank" if part == "step" else "bytes"
    return {
        row[size_key]: row["times"][rival]
        for row in merged
        if (row["algorithm"], row["mpi"]) == (contender, mpi)
        and min_size <= row[size_key] <= max_size
        and rival in row["times"]
    }


def _ratio_claim(
    part: str,
    contender: str,
    rival: str,
    ratios: Mapping[int, float],
    aggregate: str,
    minimum: float | None,
) -> dict[str, bool | None]:
    size_label: Callable[[int], str] = str if part == "step" else size_text
    sizes = (
        f"{size_label(min(ratios))} .. {size_label(max(ratios))}"
        if len(ratios) > 1
        else size_label(min(ratios))
    )
    if aggregate == "mean":
        value = float(np.exp(np.mean(np.log(list(ratios.values())))))
        value_text = "geometric mean"
    else:
        slowest_size = min(ratios, key=lambda size: ratios[size])
        value, value_text = ratios[slowest_size], f"least, at {size_label(slowest_size)}"
    claim = f"{part}: {contender} {value:.2f}x {rival} ({value_text}, {sizes})"
    return {claim: None} if minimum is None else {f"{claim}, >= {minimum}": value >= minimum}
