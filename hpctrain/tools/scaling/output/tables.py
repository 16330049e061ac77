"""A study as a table and as CSV: measured, missing and predicted sizes."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.table import Table

from hpctrain.cluster.netlab.netlab import parse_speed
from hpctrain.core.fitted_table import make_table
from hpctrain.tools.bench.prediction.predict import format_time
from hpctrain.tools.scaling import statistics
from hpctrain.tools.scaling.forecast import StepModel
from hpctrain.tools.scaling.results import Result, Row
from hpctrain.tools.scaling.statistics import Estimate
from hpctrain.tools.scaling.study import Study
from hpctrain.tuning import choose

HEADINGS = ("samples/s", "step", "speed-up", "efficiency", "compute", "wait", "other", "wire")
MEASURED, GAP, PREDICTED = "measured", "gap", "predicted"
PREDICTED_NOTE = "Predicted, not measured, for ranks with cores of their own"
UNTESTED = "which any such model fits: one more size would check it"
WIDE_INTERVAL = 0.1  #: half an interval of efficiency
MAX_RATE_SPREAD = 0.25  #: half an interval of samples/s over its mean, as `tune` has for times
MAX_CREDIBLE = 1.02  #: efficiency, and a share of a link's rate, that only noise exceeds
BOUND = 1 - 1e-9  #: serial fractions above are 1
LAW_NAMES = {"amdahl": "Amdahl's law", "gustafson": "Gustafson's law"}


def table(result: Result) -> Table:
    """Return the rows as a table; intervals stand behind their means; a grid is data x pipe."""
    sizes = ["ranks", *["grid"] * (result.study.pipe > 1), *["nodes"] * _over_nodes(result)]
    return make_table([*sizes, *HEADINGS, ""], cells(result), "", title=title(result.study))


def cells(result: Result) -> list[list[str]]:
    """Return the words of each row of the table."""
    return [[*_size(row, result), *_numbers(row), "; ".join(remarks(row))] for row in result.rows]


def _size(row: Row, result: Result) -> list[str]:
    pipe, ranks = result.study.pipe, row["ranks"]
    grid = [f"{ranks // pipe} x {pipe}"] * (pipe > 1)
    return [str(ranks), *grid, *[str(row["nodes"])] * _over_nodes(result)]


def _over_nodes(result: Result) -> bool:
    return any(row["nodes"] > 1 for row in result.rows)


def title(study: Study) -> str:
    """Return the title of tables and plots."""
    place = {"local": "this machine", "slurm": "Slurm"}.get(
        study.on, f"a netlab, links of {study.link}"
    )
    batch = f"batch {study.batch}" + " per rank" * (study.mode == "weak")
    return f"{study.name}: {study.mode} scaling, {batch}, on {place}"


def _numbers(row: Row) -> list[str]:
    if row["kind"] == GAP:
        return ["-"] * len(HEADINGS)
    rate = with_interval(row, "samples_per_s", ",.0f")
    ratios = [with_interval(row, "speed_up", ".2f"), with_interval(row, "efficiency", ".1%")]
    parts = [seconds(row.get(f"{name}_s")) for name in ("compute", "wait", "other", "wire")]
    return [rate, seconds(row["step_s"]), *ratios, *parts]


def seconds(value: float | None) -> str:
    """Return seconds with their unit, a dash for none."""
    return "-" if value is None else format_time(value) if value > 1e-9 else "0 us"


def with_interval(row: Row, name: str, form: str) -> str:
    """Return a mean and half its interval, in one unit."""
    half_width = row.get(f"{name}_ci95")
    mean = format(row[name], form)
    if half_width is None:
        return mean
    return (
        f"{mean.rstrip('%')} ± {format(half_width, form)}"
        if is_meaningful(row, name)
        else f"{mean} ± ?"
    )


def is_meaningful(row: Row, name: str) -> bool:
    """Return whether the interval of a mean is meaningful: no rate and no time is below zero."""
    half_width = row.get(f"{name}_ci95")
    return half_width is not None and half_width < abs(row[name])


def remarks(row: Row) -> Iterator[str]:
    """Yield the remarks on a row."""
    if row["kind"] == PREDICTED:
        yield PREDICTED
        if row.get("samples_per_s_ci95") is None:
            yield "from one repeat"
    if row["kind"] == GAP:
        yield f"gap: {row['reason']}"
    elif row.get("repeats_missing"):
        yield f"{row['repeats_missing']} of its repeats missing: {row['reason']}"
    if row.get("ranks_per_core", 1.0) > 1:
        yield f"oversubscribed: {row['ranks_per_core']:.3g} ranks per core"
    if row.get("samples_per_s_ci95") is not None and not is_meaningful(row, "samples_per_s"):
        yield "± ?: repeats differ by more than they have in common"
    if row["kind"] == MEASURED and row["efficiency"] > MAX_CREDIBLE:
        yield "above 100 %: noise, or data that fit the caches of more ranks alone"
    if "prediction_error" in row:
        error, step = row["prediction_error"], format_time(row["predicted_step_s"])
        yield f"from smaller sizes {step} was predicted ({error:+.1%})"


def summary_lines(result: Result) -> Iterator[str]:
    """Yield the summary of a report: measured and predicted sizes, and how far to trust them."""
    measured = result.of(MEASURED)
    for kind, word in ((MEASURED, "Measured"), (GAP, "Not measured"), (PREDICTED, PREDICTED_NOTE)):
        if rows := result.of(kind):
            yield f"{word}: {rank_list([row['ranks'] for row in rows])}."
    apart = [row for row in measured[1:] if row["ranks_per_core"] == 1]
    for row in apart[-1:]:
        ratios = [with_interval(row, "speed_up", ".2f"), with_interval(row, "efficiency", ".1%")]
        baseline_text = f"the samples/s of {rank_list([measured[0]['ranks']])}"
        yield (
            f"{row['ranks']} ranks do {ratios[0]} times {baseline_text}: "
            f"an efficiency of {ratios[1]}."
        )
    if noise := noise_text(result):
        yield f"{noise[0].upper()}{noise[1:]}."
    if measured and result.study.repeats == 1:
        yield "One repeat: how much another would differ is unknown."


TOO_NOISY = "too noisy to conclude"


def noise_text(result: Result) -> str:
    """Return that repeats differ too much to conclude, and on how many ranks; else ""."""
    measured_rows = result.of(MEASURED)
    noisy_ranks = [row["ranks"] for row in measured_rows if _is_noisy(row)]
    if noisy_ranks:
        return (
            f"{TOO_NOISY}: repeats on {rank_list(noisy_ranks)} differ much; measure on a "
            "quieter machine, or with more --repeats"
        )
    if spread := choose.exceeding_spread(row["spread"] for row in measured_rows):
        return f"{TOO_NOISY}: {choose.noise_warning(spread, 'measure')}"
    return ""


def _is_noisy(row: Row) -> bool:
    """Return whether the interval of a measured rate or efficiency is too wide to conclude."""
    rate_half_width = row.get("samples_per_s_ci95") or 0.0
    return (
        rate_half_width > MAX_RATE_SPREAD * row["samples_per_s"]
        or (row["efficiency_ci95"] or 0.0) > WIDE_INTERVAL
    )


def rank_list(ranks: Sequence[int]) -> str:
    """Return numbers of ranks in words."""
    *head, last = map(str, dict.fromkeys(ranks))
    return f"{', '.join(head)} and {last} ranks" if head else f"{last} rank{'s' * (last != '1')}"


def facts(result: Result) -> dict[str, str]:
    """Return the number of trials and the results of the fits, by name."""
    texts = {"trials": _trials_text(result.study)}
    if noise := noise_text(result):
        texts["noise"] = noise
    if result.serial is not None:
        texts[LAW_NAMES[result.law]] = law_text(result) + f"; {TOO_NOISY}" * bool(noise)
    if result.model is not None:
        untested = "" if result.tested else f", {UNTESTED}"
        noise = _faster_than_link(result.model, result.study.link)
        texts["alpha-beta model"] = _model_text(result.model) + noise + untested
    return texts


def _trials_text(study: Study) -> str:
    steps = (
        f"{study.timing.last - study.timing.first} timed steps, of which the median of ten parts"
    )
    if study.repeats == 1:
        return f"1 repeat of {steps} counts; one repeat has no interval"
    order = "as Slurm started them" if study.on == "slurm" else "sizes in turn"
    return (
        f"{study.repeats} repeats of {steps} counts, {order}; means over repeats, ± half the "
        "interval of 95 % confidence by Student's t; speed-up and efficiency are ratios within a "
        "repeat"
    )


def _model_text(model: StepModel) -> str:
    rate = f"{8e-9 / model.beta_s:.3g} Gbit/s" if model.beta_s else "no cost per byte"
    overlap_text = (
        f"in {model.buckets} buckets during backward" if model.buckets else "after backward"
    )
    return (
        f"alpha {format_time(model.alpha_s)}, beta {model.beta_s * 1e9:.3g} ns per byte ({rate}), "
        f"{model.algorithm} of {model.nbytes:,} bytes, {overlap_text}; from {model.origin}, scaled "
        f"to the measured wire time of {rank_list(model.ranks)}"
    )


def _faster_than_link(model: StepModel, link: str | None) -> str:
    """Return a remark on a fitted rate above the netlab's link rate, else ""."""
    if link is None or not model.beta_s or 8 / model.beta_s < MAX_CREDIBLE * parse_speed(link):
        return ""
    return f"; more than a link of {link} carries: noise, or trials too short to fill it"


def law_text(result: Result) -> str:
    """Describe the fitted law and its misfit."""
    if result.law_misfit is None:
        return f"{_serial_text(result)}; two sizes always fit: a third one would check it"
    ranks = rank_list(result.law_ranks)
    return f"{_serial_text(result)}; the law is within {result.law_misfit:.1%} of {ranks}"


def _serial_text(result: Result) -> str:
    serial = result.serial
    assert serial is not None
    if serial.mean > BOUND:
        return "serial fraction 100%, its bound: more ranks brought no more samples/s"
    text = f"serial fraction {_ranged(serial, '{:.1%}'.format, (-1, 1))}"
    if not serial.mean:
        return f"{text}: no part that limits the speed-up was measured"
    if result.law == "amdahl":
        limit = _ranged(serial, lambda s: f"{1 / s:.3g}" if s else "no bound", (1, -1))
        return f"{text}; the speed-up stays below {limit}"
    work = _ranged(serial, lambda s: f"{statistics.gustafson_speed_up(s, 64):.3g}", (1, -1))
    return f"{text}; if it held, 64 ranks would do {work} times the work of one"


def _ranged(serial: Estimate, form: Callable[[float], str], limits: tuple[int, int]) -> str:
    """Return `form` of the serial fraction, then of both `limits` of its interval."""
    if serial.half is None:
        return form(serial.mean)
    low, high = (form(min(1.0, max(0.0, serial.mean + end * serial.half))) for end in limits)
    return f"{form(serial.mean)} ({low} to {high})"


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as CSV: a column per value, empty where a row has none."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
