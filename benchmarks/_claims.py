"""What benchmarks/engines.py claims, as functions of the rows of its studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def mean(rows: Sequence[Row], key: str, **where: Any) -> float:
    """Return the mean of column `key` over the results that have the values of `where`."""
    found = [row[key] for row in rows if all(row[name] == one for name, one in where.items())]
    if not found or None in found:
        raise LookupError(f"no {key} of {where}")
    return float(np.mean(found))


def straggler(rows: Sequence[Row]) -> dict[str, bool]:
    def seconds(method: str, factor: float) -> float:
        return mean(rows, "time_to_target_s", method=method, slow_factor=factor)

    sync, late, backup, free, bound = (
        seconds("sync (server)", 1.0), seconds("sync (server)", 10.0),
        seconds("1 backup worker", 10.0), seconds("async", 10.0), seconds("SSP s = 3", 10.0),
    )  # fmt: skip
    others = {row["method"]: seconds(row["method"], 1.0) for row in rows}
    fastest = min(others, key=lambda method: others[method])
    return {
        f"beside a worker 10 times slower sync takes {late:.1f} s, {late / sync:.1f} times what it "
        "takes without, >= 5": late >= 5 * sync,
        f"with a backup worker {backup:.1f} s, {backup / sync:.2f} times sync's time without a "
        "slow worker, <= 1.5": backup <= 1.5 * sync,
        f"async {free:.1f} s, {free / sync:.2f} times, <= 2": free <= 2 * sync,
        f"a bound of 3 steps is no help where a worker is always slow: {bound:.1f} s, "
        f"{bound / late:.2f} times what sync takes there, >= 0.5": bound >= 0.5 * late,
        f"without a slow worker sync takes {sync:.1f} s, <= 1.5 times the fastest, which is "
        f"{fastest} with {others[fastest]:.1f} s": sync <= 1.5 * others[fastest],
    }


def staleness(rows: Sequence[Row]) -> dict[str, bool]:
    single = mean(rows, "accuracy", method="single", rate=0.5)
    claims = {}
    for n in (8, 16):
        at = {"rate": 0.5, "workers": n, "softsync": n}
        plain = mean(rows, "accuracy", method="none", **at)
        ruled = mean(rows, "accuracy", method="inverse-staleness", **at)
        stale = mean(rows, "staleness_mean", method="none", **at)
        claims |= {
            f"{n} workers are stale by {stale:.1f} on average, within 1.5 of {n}": (
                abs(stale - n) <= 1.5
            ),
            f"at the rate of one device, which reaches {single:.1%}, {n}-softsync with the plain "
            f"rate reaches {plain:.1%}, <= 20 %": plain <= 0.2,
            f"... and with rate/staleness {ruled:.1%}, within 3 points of it": (
                ruled >= single - 0.03
            ),
        }
    return claims


def sent(rows: Sequence[Row]) -> dict[str, bool]:
    def of(method: str, period: int) -> tuple[float, float]:
        at = {"method": method, "period": period}
        return mean(rows, "accuracy", **at), mean(rows, "bytes_sent_per_rank", **at)

    sync, most = of("all-reduce, SGD", 1)
    local_1, _ = of("local SGD", 1)
    local_64, few = of("local SGD", 64)
    adamw, _ = of("all-reduce, AdamW", 1)
    diloco, less = of("DiLoCo", 32)
    return {
        f"local SGD with H = 1 reaches {local_1:.1%}, all-reduce {sync:.1%}, the same within 0.5 "
        "points": abs(local_1 - sync) <= 0.005,
        f"H = 64 sends {few / most:.3f} of the bytes, <= 0.02, and reaches {local_64:.1%}, within "
        "3 points": few <= 0.02 * most and local_64 >= sync - 0.03,
        f"DiLoCo with H = 32 sends {less / most:.3f} of the bytes, <= 0.04, and reaches "
        f"{diloco:.1%}, within 2 points of all-reduce with AdamW, {adamw:.1%}": (
            less <= 0.04 * most and diloco >= adamw - 0.02
        ),
    }


def period(rows: Sequence[Row]) -> dict[str, bool]:
    methods = ("single", "Downpour", "EASGD", "EAMSGD")
    single, downpour, easgd, eamsgd = (mean(rows, "accuracy", method=m) for m in methods)
    slow, fast = mean(rows, "rate", method="Downpour"), mean(rows, "rate", method="EASGD")
    return {
        f"Downpour, tuned, bears a rate of {slow:g}, EASGD of {fast:g}: >= 5 times as much": (
            fast >= 5 * slow
        ),
        f"Downpour reaches {downpour:.1%}, EASGD {easgd:.1%}, more by >= 1 point": (
            easgd >= downpour + 0.01
        ),
        f"EAMSGD reaches {eamsgd:.1%}, not less than EASGD by 0.5 points": eamsgd >= easgd - 0.005,
        f"the centre of 4 workers is not worse than one worker, {single:.1%}, by 0.5 points": (
            easgd >= single - 0.005
        ),
    }


CLAIMS: dict[str, Callable[[Sequence[Row]], dict[str, bool]]] = {
    "straggler": straggler,
    "staleness": staleness,
    "period": period,
    "bytes": sent,
}


def claims_of(study: str, rows: Sequence[Row]) -> dict[str, bool]:
    """Return {claim: whether it holds}, for the rows that are results."""
    try:
        return CLAIMS[study]([row for row in rows if row["role"] == "result"])
    except LookupError as missing:  # some methods were left out, or never reached the target
        return {f"everything was measured: {missing}": False}
