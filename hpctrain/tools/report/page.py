"""The page of a run: one HTML file that holds all it shows and needs no network."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import jinja2

from hpctrain.core import atomic
from hpctrain.core.errors import UsageError
from hpctrain.core.names import fold_names
from hpctrain.tools.report.plots import plots
from hpctrain.tools.report.record import Loss, RunRecord, read

log = logging.getLogger(__name__)
PAGE = "report.html"
#: The headlines of the page: {key of the summary: (name, format)}.
HEADLINES = {
    "test_accuracy": ("test accuracy", "{:.4f}"),
    "test_auc": ("test AUC", "{:.4f}"),
    "test_f1": ("test F1", "{:.4f}"),
    "test_f1_macro": ("test F1, macro", "{:.4f}"),
    "test_rmse": ("test RMSE", "{:.4g}"),
    "test_r2": ("test R²", "{:.4f}"),
    "test_loss": ("test loss", "{:.4g}"),
    "train_loss": ("train loss", "{:.4g}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "wall_s": ("wall time", "{:,.2f} s"),
    "steps": ("steps", "{:,}"),
    "world_size": ("ranks", "{}"),
    "ettr": ("ETTR", "{:.4f}"),
}
MAX_LISTED = 16  #: values of a list; of more their range
#: Headlines of a resumed run that cover only the steps since it was resumed.
TIMED = {"samples/s", "wall time"}
#: Keys of the summary in seconds; others that end in _s are rates.
SECONDS = {"wall_s", "compute_s", "wait_s", "wire_s", "data_wait_s", "lost_s"}
#: Keys of the summary that are not words once their underscores are gone.
WORDS = {
    "world_size": "ranks",
    "gpus": "GPUs",
    "gpu_paths": "paths of GPU memory",
    "since_step": "times are since step",
    "samples_per_s": "samples/s",
    "wall": "wall time",
    "compute": "time in forward, backward, update",
    "wait": "time waiting for the wire",
    "wire": "time in collectives",
    "data_wait": "time waiting for data",
    "lost": "time without progress",
    "ettr": "ETTR, the part of the time with progress",
    "bytes_sent_per_rank": "MiB sent, mean of ranks",
    "staleness_mean": "staleness, mean",
    "staleness_max": "staleness, largest",
    "staleness_histogram": "gradients by staleness",
    "clock_gap_max": "largest clock gap",
    "idle_fraction": "idle fraction of each rank",
    "params_sha256": "SHA-256 of the parameters",
    "threads": "BLAS threads of a rank",
    "mesh": "pipeline",
}


def write(run: Path, out: Path) -> Path:
    """Write the page and the plots of the run in folder `run` to `out`; return the page's path.

    Raises UsageError where there is no run or `out` cannot be written.
    """
    record = read(run)
    images = _draw_plots(record)
    files = {**images, PAGE: page(record, images).encode()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            atomic.replace(out / name, content)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error
    return out / PAGE


def _draw_plots(record: RunRecord) -> dict[str, bytes]:
    """Return the plots; raise UsageError for numbers that cannot be drawn."""
    try:
        return plots(record)
    except (ValueError, ArithmeticError, TypeError, IndexError, MemoryError) as error:
        log.debug("where it was drawn:", exc_info=True)
        raise UsageError(f"the rows of {record.folder} cannot be drawn: {error}") from None


def page(record: RunRecord, images: Mapping[str, bytes]) -> str:
    """Return the page as HTML; `images` are PNGs by file name."""
    summary = dict(record.summary)
    for drawn in ("rank_hosts", "test_confusion"):  # in ranks.png, and as a heat map
        summary.pop(drawn, None)
    versions = summary.pop("versions", None) or {}
    return render(
        __package__,
        record=record,
        losses=[_loss_cells(loss) for loss in record.losses()],
        headlines=_headlines(summary),
        images=encode(images),
        summary={
            key: (words(key), text_of(_scale_value(key, value))) for key, value in summary.items()
        },
        versions=versions,
    )


def render(package: str, **values: Any) -> str:
    """Return page.html of `package` filled with `values`, such as names from recipes: escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    text = resources.files(package).joinpath("page.html").read_text()
    return environment.from_string(text).render(**values)


def encode(images: Mapping[str, bytes]) -> dict[str, str]:
    """Return images as base64, to be part of a page."""
    return {name: b64encode(png).decode() for name, png in images.items()}


def _loss_cells(loss: Loss) -> list[str]:
    """Return a loss of ranks as a row of the page's table."""
    lost_s = None if loss.lost_s is None else f"{loss.lost_s:.3f} s"
    lists = [list(dict.fromkeys(x)) for x in (loss.ranks, loss.hosts, loss.spares)]
    return [*map(text_of, (loss.step, f"{loss.at_s:.2f} s", *lists, lost_s, loss.steps_redone))]


def _headlines(summary: Mapping[str, Any]) -> dict[str, str]:
    present_values = {key: value for key, value in summary.items() if value is not None}
    if not summary.get("recoveries"):
        present_values.pop("ettr", None)  # 1: nothing was lost
    headlines = {
        name: form.format(present_values[key])
        for key, (name, form) in HEADLINES.items()
        if key in present_values
    }
    if since_step := summary.get("since_step"):  # the clock of a resumed run began there
        headlines = {
            f"{name} since step {since_step:,}" if name in TIMED else name: text
            for name, text in headlines.items()
        }
    return headlines


def _scale_value(key: str, value: Any) -> Any:
    """Return bytes as MiB, recoveries as their number, other values as they are."""
    if key == "recoveries":
        return len(value)
    if key == "hosts" and isinstance(value, list):
        return fold_names(value)
    return value / 2**20 if key == "bytes_sent_per_rank" and value is not None else value


def _fold_list(values: list[Any]) -> str:
    """Return a long list, such as one number per rank, in a line."""
    numbers = [x for x in values if isinstance(x, int | float)]
    if len(numbers) < len(values):
        return f"{', '.join(map(text_of, values[:MAX_LISTED]))} and {len(values) - MAX_LISTED} more"
    largest_index = max(range(len(values)), key=lambda i: values[i])
    return (
        f"{text_of(min(values))} to {text_of(max(values))}, median {text_of(median(values))}; "
        f"the largest is number {largest_index} of 0 to {len(values) - 1}"
    )


def words(key: str) -> str:
    """Return the label of a key of the summary."""
    name, unit = (key.removesuffix("_s"), " [s]") if key in SECONDS else (key, "")
    return WORDS.get(name, name.replace("_", " ")) + unit


def text_of(value: Any) -> str:
    """Return a value of the summary as text; null is a dash."""
    if value is None or value == []:
        return "–"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(item)}" for key, item in value.items())
    if isinstance(value, list) and len(value) > MAX_LISTED:
        return _fold_list(value)
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return str(value)
