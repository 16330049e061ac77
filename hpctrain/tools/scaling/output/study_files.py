"""The output files of a study; each written whole or not at all, at any time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.core import atomic
from hpctrain.core.errors import UsageError
from hpctrain.core.strict_json import to_json
from hpctrain.tools.scaling.output import tables
from hpctrain.tools.scaling.results import Result

log = logging.getLogger(__name__)
MISSING = (
    "no plots and no report.html: they are drawn with matplotlib and jinja2; run: "
    "pip install 'hpctrain[report]', then the same command again"
)


def can_draw() -> bool:
    """Return whether plots and the report can be made on this host; log a warning if not."""
    try:
        import hpctrain.tools.scaling.output.plots  # noqa: F401  late: only drawing needs them
    except ImportError:
        log.warning(MISSING)
        return False
    return True


def write(folder: Path, result: Result, changes: Sequence[str], with_plots: bool) -> list[Path]:
    """Write JSON, CSV and, if `with_plots`, plots and the report; return their paths."""
    files = {
        "scaling.json": (to_json(_result_json(result), indent=1) + "\n").encode(),
        "scaling.csv": tables.to_csv(result.rows).encode(),
    }
    if with_plots:
        from hpctrain.tools.scaling.output.plots import PAGE, page, plots

        images = plots(result, heading="", formats=("png",))
        files |= {**plots(result), PAGE: page(result, images, changes).encode()}
    try:
        for name, content in files.items():
            atomic.replace(folder / name, content)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]


def _result_json(result: Result) -> dict[str, Any]:
    """Return the contents of scaling.json."""
    study, model = result.study, result.model
    wire = {"alpha_s": model.alpha_s, "beta_s_per_byte": model.beta_s} if model else {}
    return {
        "machine": result.machine,
        "study": {key: value for key, value in asdict(study).items() if key != "machine"},
        "numbers": "means over repeats; of a trial the median of ten parts of its timed steps",
        "confidence": "95 %, Student's t over repeats",
        "law": {
            "name": result.law,
            "serial_fraction": result.serial and asdict(result.serial),
            "ranks": list(result.law_ranks),
            "misfit": result.law_misfit,
        },
        "model": {**wire, **asdict(model)} if model else None,
        "rows": result.rows,
    }
