"""A study as a table and as CSV: what was measured, what is missing, what is predicted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hpctrain.bench.predicted import time
from hpctrain.scaling import laws
from hpctrain.scaling.results import Result, Row

HEADINGS = ("samples/s", "step", "speed-up", "efficiency", "compute", "wait", "other", "wire")
MEASURED, GAP, PREDICTED = "measured", "gap", "predicted"


def table(found: Result) -> Table:
    """Return the rows as a table; intervals stand behind their means."""
    shown = Table(title=escape(title(found)))
    nodes = ["nodes"] * _over_nodes(found)
    for heading in ("ranks", *nodes, *HEADINGS):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    for words in cells(found):
        shown.add_row(*map(escape, words))
    return shown


def cells(found: Result) -> list[list[str]]:
    """Return the words of each row of the table."""
    sizes = [[str(r["ranks"]), *[str(r["nodes"])] * _over_nodes(found)] for r in found.rows]
    pairs = zip(sizes, found.rows, strict=True)
    return [[*size, *_numbers(row), "; ".join(remarks(row))] for size, row in pairs]


def _over_nodes(found: Result) -> bool:
    return any(row["nodes"] > 1 for row in found.rows)


def title(found: Result) -> str:
    """Return the title of tables and plots."""
    study = found.study
    where = {"local": "this machine", "slurm": "Slurm"}.get(study.on, f"a netlab of {study.link}")
    batch = f"batch {study.batch}" + " per rank" * (study.mode == "weak")
    return f"{study.name}: {study.mode} scaling, {batch}, on {where}"


def _numbers(row: Row) -> list[str]:
    if row["kind"] == GAP:
        return ["-"] * len(HEADINGS)
    rate = within(row, "samples_per_s", ",.0f")
    ratios = [within(row, "speed_up", ".2f"), within(row, "efficiency", ".1%")]
    parts = [seconds(row.get(f"{name}_s")) for name in ("compute", "wait", "other", "wire")]
    return [rate, seconds(row["step_s"]), *ratios, *parts]


def seconds(value: float | None) -> str:
    """Return seconds with their unit, a dash for none."""
    return "-" if value is None else time(value) if value > 1e-9 else "0 us"


def within(row: Row, name: str, form: str) -> str:
    """Return a mean and half its interval, in one unit."""
    half = row.get(f"{name}_ci95")
    mean = format(row[name], form)
    return mean if half is None else f"{mean.rstrip('%')} ± {format(half, form)}"


def remarks(row: Row) -> Iterator[str]:
    """Yield what is to be known of a row."""
    if row["kind"] == PREDICTED:
        yield PREDICTED
    if row["kind"] == GAP:
        yield f"gap: {row['reason']}"
    elif row.get("repeats_missing"):
        yield f"{row['repeats_missing']} of its repeats missing: {row['reason']}"
    if row.get("ranks_per_core", 1.0) > 1:
        yield f"oversubscribed: {row['ranks_per_core']:.3g} ranks per core"
    if "prediction_error" in row:
        error, step = row["prediction_error"], time(row["predicted_step_s"])
        yield f"from smaller sizes {step} was predicted ({error:+.1%})"


def facts(found: Result) -> dict[str, str]:
    """Return what the fits say, by name."""
    study, model = found.study, found.model
    told = {
        "trials": f"{study.repeats} repeats of {study.timing.last - study.timing.first} timed "
        "steps, sizes in turn; ± is the interval of 95 % confidence by Student's t over repeats"
    }
    if found.serial is not None:
        told[laws_name(found.law)] = law_said(found)
    if model is not None:
        rate = f"{8e-9 / model.beta_s:.3g} Gbit/s" if model.beta_s else "no cost per byte"
        told["alpha-beta model"] = (
            f"alpha {time(model.alpha_s)}, beta {model.beta_s * 1e9:.3g} ns per byte ({rate}), "
            f"{model.algorithm} of {model.nbytes:,} bytes, "
            + (f"in {model.buckets} buckets during backward" if model.buckets else "after backward")
        )
    return told


def laws_name(law: str) -> str:
    """Return the name of a law as people write it."""
    return {"amdahl": "Amdahl's law", "gustafson": "Gustafson's law"}[law]


def law_said(found: Result) -> str:
    """Return what the fitted law says."""
    assert found.serial is not None
    row = {"serial": found.serial.mean, "serial_ci95": found.serial.half}
    fraction = within(row, "serial", ".1%")
    if found.law == "amdahl":
        most = f"{1 / found.serial.mean:.3g}" if found.serial.mean else "without bound"
        return f"serial fraction {fraction}; the speed-up stays below {most}"
    at = laws.gustafson_speed_up(found.serial.mean, 64)
    return f"serial fraction {fraction}; 64 ranks would do {at:.3g} times the work of one"


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV: a column per value, empty where a row has none."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
