"""What benchmarks/compare.py merges of its runs under two MPIs, and what it claims of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.bench.message_sizes import size_text

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
EXPOSED_AT, EXPOSED_SHARE = 32, 1 / 3  #: batch per rank; of what each of these exposes, at most
EXPOSING = ("horovod", "gloo")
Row = dict[str, Any]


def merge(runs: Sequence[Sequence[Row]], mpis: Sequence[str], part: str) -> list[Row]:
    """Return a row per MPI, algorithm and size: the median over runs of the medians.

    `times`: how many times faster it is than each rival, of which each is taken under the MPI
    under which it is faster, and than the native of its own MPI.
    """
    at = "batch_per_rank" if part == "step" else "bytes"
    cells: dict[tuple[str, str, int], list[Row]] = {}
    for rows, mpi in zip(runs, mpis, strict=True):
        for row in rows:
            cells.setdefault((mpi, row["algorithm"], row[at]), []).append(row)
    merged = [_merged(mpi, found) for (mpi, _, _), found in cells.items()]
    for row in merged:
        same = [other for other in merged if other[at] == row[at]]
        row["times"] = {
            rival: min(r["median_s"] for r in same if r["algorithm"] == rival) / row["median_s"]
            for rival in ("native", "horovod", "gloo")
            if any(r["algorithm"] == rival for r in same)
        }
        for own in same:
            if own["algorithm"] in NATIVES and own["mpi"] == row["mpi"]:
                row["times"][f"own {own['algorithm']}"] = own["median_s"] / row["median_s"]
    return merged


def _merged(mpi: str, found: Sequence[Row]) -> Row:
    medians = [row["median_s"] for row in found]
    row = {key: found[0].get(key) for key in ("operation", "algorithm", "bytes", "ranks")}
    if "batch_per_rank" in found[0]:
        exposed = [r["exposed_s"] for r in found if r["exposed_s"] is not None]
        row["batch_per_rank"] = found[0]["batch_per_rank"]
        row["alone_s"] = float(np.median([r["alone_s"] for r in found]))
        row["exposed_s"] = float(np.median(exposed)) if exposed else None
        row["samples_per_s"] = float(np.median([r["samples_per_s"] for r in found]))
    else:
        row["busbw"] = float(np.median([r["busbw"] for r in found]))
        row["share_of_floor"] = float(np.median([r["share_of_floor"] for r in found]))
    return row | {
        "mpi": mpi,
        "runs": len(found),
        "median_s": float(np.median(medians)),
        "p5_s": min(medians),  # over runs: the fastest and the slowest
        "p95_s": max(medians),
        "correct": all(r["correct"] for r in found),
    }


def claims(part: str, ranks: int, merged: Sequence[Row]) -> dict[str, bool | None]:
    """Return {claim: whether it holds}, None where nothing is claimed; each under every MPI."""
    right = all(row["correct"] for row in merged)
    held: dict[str, bool | None] = {f"{part}: all results are right": right}
    for ours, rival, low, high, how, least in CLAIMS.get((part, ranks), []):
        for mpi in sorted({row["mpi"] for row in merged}):
            ratios = _ratios(merged, part, ours, rival, mpi, low, high)
            if ratios:
                held |= _claim(part, f"{ours}, {mpi}", rival, ratios, how, least)
    return {**held, **(exposed(merged) if part == "step" else {})}


def exposed(merged: Sequence[Row]) -> dict[str, bool]:
    """Return claims of each library's step minus its own step without communication.

    A rival's is the least it has under any MPI.
    """
    at = [row for row in merged if row["batch_per_rank"] == EXPOSED_AT]
    held = {}
    for ours in (row for row in at if row["algorithm"] == "auto"):
        for rival in EXPOSING:
            theirs = [row["exposed_s"] for row in at if row["algorithm"] == rival]
            if theirs:
                share = ours["exposed_s"] / min(theirs)
                held[
                    f"step: auto, {ours['mpi']} exposes {ours['exposed_s'] * 1e3:.2f} ms of "
                    f"communication at {EXPOSED_AT}, {share:.3f} of {rival}'s "
                    f"{min(theirs) * 1e3:.2f} ms, <= 1/3"
                ] = ours["exposed_s"] <= EXPOSED_SHARE * min(theirs)
    return held


def _ratios(
    merged: Sequence[Row], part: str, ours: str, rival: str, mpi: str, low: int, high: int
) -> dict[int, float]:
    at = "batch_per_rank" if part == "step" else "bytes"
    return {
        row[at]: row["times"][rival]
        for row in merged
        if (row["algorithm"], row["mpi"]) == (ours, mpi)
        and low <= row[at] <= high
        and rival in row["times"]
    }


def _claim(
    part: str, ours: str, rival: str, ratios: Mapping[int, float], how: str, least: float | None
) -> dict[str, bool | None]:
    show: Callable[[int], str] = str if part == "step" else size_text
    sizes = f"{show(min(ratios))} .. {show(max(ratios))}" if len(ratios) > 1 else show(min(ratios))
    if how == "mean":
        value = float(np.exp(np.mean(np.log(list(ratios.values())))))
        what = "geometric mean"
    else:
        worst = min(ratios, key=lambda size: ratios[size])
        value, what = ratios[worst], f"least, at {show(worst)}"
    found = f"{part}: {ours} {value:.2f}x {rival} ({what}, {sizes})"
    return {found: None} if least is None else {f"{found}, >= {least}": value >= least}
