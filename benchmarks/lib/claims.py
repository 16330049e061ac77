"""What benchmarks/engines.py claims, as functions of the rows of its studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def mean(rows: Sequence[Row], key: str, **conditions: Any) -> float:
    """Return the mean of column `key` over the results that have the values of `conditions`."""
    values = [
        row[key] for row in rows if all(row[name] == value for name, value in conditions.items())
    ]
    if not values or None in values:
        raise LookupError(f"no {key} of {conditions}")
    return float(np.mean(values))


def straggler_claims(rows: Sequence[Row]) -> dict[str, bool]:
    def time_to_target(method: str, factor: float) -> float:
        return mean(rows, "time_to_target_s", method=method, slow_factor=factor)

    sync_s, slow_s, backup_s, async_s, bounded_s = (
        time_to_target("sync (server)", 1.0), time_to_target("sync (server)", 10.0),
        time_to_target("1 backup worker", 10.0), time_to_target("async", 10.0),
        time_to_target("SSP s = 3", 10.0),
    )  # fmt: skip
    base_s = {row["method"]: time_to_target(row["method"], 1.0) for row in rows}
    fastest = min(base_s, key=lambda method: base_s[method])
    return {
        f"beside a worker 10 times slower sync takes {slow_s:.1f} s, {slow_s / sync_s:.1f} times "
        "what it takes without, >= 5": slow_s >= 5 * sync_s,
        f"with a backup worker {backup_s:.1f} s, {backup_s / sync_s:.2f} times sync's time without "
        "a slow worker, <= 1.5": backup_s <= 1.5 * sync_s,
        f"async {async_s:.1f} s, {async_s / sync_s:.2f} times, <= 2": async_s <= 2 * sync_s,
        f"a bound of 3 steps is no help where a worker is always slow: {bounded_s:.1f} s, "
        f"{bounded_s / slow_s:.2f} times what sync takes there, >= 0.5": bounded_s >= 0.5 * slow_s,
        f"without a slow worker sync takes {sync_s:.1f} s, <= 1.5 times the fastest, which is "
        f"{fastest} with {base_s[fastest]:.1f} s": sync_s <= 1.5 * base_s[fastest],
    }


def staleness_claims(rows: Sequence[Row]) -> dict[str, bool]:
    single_accuracy = mean(rows, "accuracy", method="single", rate=0.5)
    claims = {}
    for n in (8, 16):
        settings = {"rate": 0.5, "workers": n, "softsync": n}
        plain_accuracy = mean(rows, "accuracy", method="none", **settings)
        scaled_accuracy = mean(rows, "accuracy", method="inverse-staleness", **settings)
        mean_staleness = mean(rows, "staleness_mean", method="none", **settings)
        claims |= {
            f"{n} workers are stale by {mean_staleness:.1f} on average, within 1.5 of {n}": (
                abs(mean_staleness - n) <= 1.5
            ),
            f"at the rate of one device, which reaches {single_accuracy:.1%}, {n}-softsync with "
            f"the plain rate reaches {plain_accuracy:.1%}, <= 20 %": plain_accuracy <= 0.2,
            f"... and with rate/staleness {scaled_accuracy:.1%}, within 3 points of it": (
                scaled_accuracy >= single_accuracy - 0.03
            ),
        }
    return claims


def bytes_claims(rows: Sequence[Row]) -> dict[str, bool]:
    def accuracy_and_bytes(method: str, period: int) -> tuple[float, float]:
        settings = {"method": method, "period": period}
        return mean(rows, "accuracy", **settings), mean(rows, "bytes_sent_per_rank", **settings)

    all_reduce, sync_bytes = accuracy_and_bytes("all-reduce, SGD", 1)
    local_1, _ = accuracy_and_bytes("local SGD", 1)
    local_64, local_bytes = accuracy_and_bytes("local SGD", 64)
    adamw_accuracy, _ = accuracy_and_bytes("all-reduce, AdamW", 1)
    diloco_accuracy, diloco_bytes = accuracy_and_bytes("DiLoCo", 32)
    return {
        f"local SGD with H = 1 reaches {local_1:.1%}, all-reduce {all_reduce:.1%}, the same within "
        "0.5 points": abs(local_1 - all_reduce) <= 0.005,
        f"H = 64 sends {local_bytes / sync_bytes:.3f} of the bytes, <= 0.02, and reaches "
        f"{local_64:.1%}, within 3 points": local_bytes <= 0.02 * sync_bytes
        and local_64 >= all_reduce - 0.03,
        f"DiLoCo with H = 32 sends {diloco_bytes / sync_bytes:.3f} of the bytes, <= 0.04, and "
        f"reaches {diloco_accuracy:.1%}, within 2 points of all-reduce with AdamW, "
        f"{adamw_accuracy:.1%}": (
            diloco_bytes <= 0.04 * sync_bytes and diloco_accuracy >= adamw_accuracy - 0.02
        ),
    }


def period_claims(rows: Sequence[Row]) -> dict[str, bool]:
    methods = ("single", "Downpour", "EASGD", "EAMSGD")
    single, downpour, easgd, eamsgd = (mean(rows, "accuracy", method=m) for m in methods)
    downpour_rate, easgd_rate = (
        mean(rows, "rate", method="Downpour"),
        mean(rows, "rate", method="EASGD"),
    )
    return {
        f"Downpour, tuned, bears a rate of {downpour_rate:g}, EASGD of {easgd_rate:g}: >= 5 times "
        "as much": (easgd_rate >= 5 * downpour_rate),
        f"Downpour reaches {downpour:.1%}, EASGD {easgd:.1%}, more by >= 1 point": (
            easgd >= downpour + 0.01
        ),
        f"EAMSGD reaches {eamsgd:.1%}, not less than EASGD by 0.5 points": eamsgd >= easgd - 0.005,
        f"the centre of 4 workers is not worse than one worker, {single:.1%}, by 0.5 points": (
            easgd >= single - 0.005
        ),
    }


CLAIMS: dict[str, Callable[[Sequence[Row]], dict[str, bool]]] = {
    "straggler": straggler_claims,
    "staleness": staleness_claims,
    "period": period_claims,
    "bytes": bytes_claims,
}


def claims_of(study: str, rows: Sequence[Row]) -> dict[str, bool]:
    """Return {claim: whether it holds}, for the rows that are results."""
    try:
        return CLAIMS[study]([row for row in rows if row["role"] == "result"])
    except LookupError as error:  # some methods were left out, or never reached the target
        return {f"everything was measured: {error}": False}
