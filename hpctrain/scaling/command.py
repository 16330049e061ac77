"""`hpctrain scale`: from the command line to a study that is run, evaluated, shown and saved."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from hpctrain import machine
from hpctrain.cluster.launch import MpiInstallation
from hpctrain.core import progress
from hpctrain.core.errors import UsageError
from hpctrain.gradients.precision import master_dtype
from hpctrain.run_files import run_folder
from hpctrain.scaling import trial_recipe, world_sizes
from hpctrain.scaling.collect import Gap, TrialResult
from hpctrain.scaling.output import live_table, study_files, tables
from hpctrain.scaling.output.live_view import LiveView
from hpctrain.scaling.results import Result, evaluate
from hpctrain.scaling.study import Study, StudyFolder, claim, merge
from hpctrain.scaling.trials import local_runner, runner, slurm_runner
from hpctrain.scaling.world_sizes import Size
from hpctrain.training import recipe, runs
from hpctrain.training.recipe import Recipe
from hpctrain.transport.placement import core_binding

WIDTH = 200  #: of tables where there is no terminal
log = logging.getLogger(__name__)
GAPS = 1  #: the exit code of a study in which something is missing
Words = Mapping[str, Any]


def scale(words: Words) -> int:
    """Run the missing trials of the study that `words` ask for; return the exit code.

    Raises UsageError before anything is run.
    """
    spec = recipe.load(words["recipe"], words["sets"])
    requested = study_of(spec, words)
    out = words["out"] or run_folder.default_path(f"scale-{requested.name}-{requested.mode}")
    with_plots = study_files.can_draw()
    with _claim(out) as folder:
        study = merge(requested, folder.load(), out)
        folder.save(study)
        try:
            study = _measure(folder, study, spec)
        except KeyboardInterrupt:
            if (partial_study := folder.load()) and partial_study.steps:
                _write(folder, partial_study, spec, with_plots)
            raise
        result, files = _write(folder, study, spec, with_plots)
    _print_result(result, files)
    return GAPS if any(row.get("repeats_missing") for row in result.rows) else 0


@contextmanager
def _claim(out: Path) -> Iterator[StudyFolder]:
    """Lock the folder of a study; if another process has locked it, show its progress."""
    try:
        with claim(out) as folder:
            yield folder
    except run_folder.LockedError:
        _show_once(StudyFolder(out))
        raise
    except KeyboardInterrupt:
        log.warning(
            "stopped: results so far are in %s; the same command with this --out goes on there", out
        )
        raise


def study_of(spec: Recipe, words: Words) -> Study:
    """Return the study that `words` ask for; raise UsageError for one that cannot run."""
    on, mode = words["on"], words["mode"]
    link = words["link"] or ("1gbit" if on == "netlab" else None)
    per_node = words["ranks_per_node"]
    per_node = (words["gpus_per_node"] or None) if per_node is None else per_node
    size_list = world_sizes.parse(words["ranks"], words["nodes"], per_node, on)
    _must_be_slurm(words)
    _must_have_gpus(words["gpus_per_node"], size_list)
    for option in ("repeats", "steps"):
        if words[option] is not None and words[option] < 1:
            raise UsageError(f"--{option}: expected 1 or more, seen {words[option]}")
    batch = trial_recipe.base_batch(spec, mode, size_list)
    trial_recipe.must_divide(spec, mode, batch, size_list)
    mpi = local_runner.must_work(on, size_list, link)
    cores = None if on == "slurm" else len(os.sched_getaffinity(0))
    study = Study(
        name=spec.run.name,
        mode=mode,
        on=on,
        link=link,
        sizes=tuple(size_list),
        repeats=words["repeats"],
        tables=spec.tables,
        batch=batch,
        gradient_bytes=_gradient_bytes(spec),
        machine=_facts(mpi),
        threads=_threads(cores, max(size_list).ranks),
        cores=cores,
        steps=words["steps"] or (slurm_runner.STEPS if on == "slurm" else None),
        job=slurm_runner.job_options(words) if on == "slurm" else {},
    )
    if on == "slurm":
        slurm_runner.must_render(study)
    return study


def _must_be_slurm(words: Words) -> None:
    """Raise UsageError for options of jobs where there are none."""
    for name in ("site", "time", "gpus_per_node", "cpus_per_task", "options"):
        if words[name] not in (None, ()) and words["on"] != "slurm":
            option = "--option" if name == "options" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is about jobs of Slurm; seen --on {words['on']}")


def _must_have_gpus(gpus: int | None, size_list: Sequence[Size]) -> None:
    for size in size_list:
        if gpus and size.per_node > gpus:
            raise UsageError(
                f"{size.text}: {size.per_node} ranks on a node, and --gpus-per-node {gpus}: a rank "
                "takes a GPU; ask for as many"
            )


def _gradient_bytes(spec: Recipe) -> int:
    """Return the bytes of a gradient, as it is summed."""
    model = runs.build_model(spec, spec.data.load(spec.run.seed))
    count = sum(math.prod(parameter.shape) for parameter in model.parameters.values())
    return int(count * master_dtype(spec.run.precision).itemsize)


def _threads(cores: int | None, largest: int) -> int | None:
    """Return the BLAS threads of a rank: its share of the cores when `largest` ranks run."""
    fair_share = None if cores is None else max(1, cores // largest)
    return core_binding.user_threads(os.environ) or fair_share


def _facts(mpi: MpiInstallation | None) -> dict[str, Any]:
    """Return the facts of this machine that results depend on."""
    facts = machine.facts([os.uname().nodename], "none")
    for name in ("cores_per_rank", "blas_threads", "hosts"):  # of this process: no rank
        facts.pop(name)
    facts.pop("date")  # a study may go on another day
    if mpi is None:  # jobs run on other nodes than this one
        return {"versions": facts["versions"]}
    return facts | {"mpi": f"{mpi.vendor} {mpi.version}"}


def _show_once(folder: StudyFolder) -> None:
    """Show the progress of a study that another process works on."""
    study = folder.load()
    if study is not None:
        statuses_of = (
            slurm_runner.current_statuses if study.on == "slurm" else runner.current_statuses
        )
        console = progress.console()
        grid = live_table.table(study, statuses_of(folder, study), tables.title(study))
        (console if console.is_terminal else Console(stderr=True, width=WIDTH)).print(grid)


def _measure(folder: StudyFolder, study: Study, spec: Recipe) -> Study:
    """Run the missing trials; return the study with its number of steps."""
    if study.steps and not runner.missing_trials(folder, study):
        return study
    with LiveView(study) as view:
        _log_folder(folder, study, view)
        if study.steps is None:
            study = runner.run_pilots(folder, study, spec, view)
            folder.save(study)
        for deviation in trial_recipe.deviations(
            spec, study.mode, study.batch, study.timing, study.threads
        ):
            view.log_line(logging.INFO, f"# {deviation}")
        view.set_study(study, runner.statuses(folder, study))
        for _ in _trials(folder, study, spec, view):
            pass
    return study


def _log_folder(folder: StudyFolder, study: Study, view: LiveView) -> None:
    view.log_line(
        logging.INFO, f"# in {folder.path}: the same command with that --out goes on there"
    )
    for size in study.sizes:
        if study.share(size) > 1:
            view.log_line(
                logging.WARNING,
                f"{size.text}: oversubscribed, {study.share(size):.3g} ranks share a core: marked "
                "in the table, and left out of fits where other sizes do",
            )


def _trials(
    folder: StudyFolder, study: Study, spec: Recipe, view: LiveView
) -> Iterator[TrialResult | Gap]:
    if study.on == "slurm":
        return slurm_runner.trials(folder, study, spec, runner.missing_trials(folder, study), view)
    runner.measure_links(folder, study, view)
    return runner.trials(folder, study, spec, view)


def collect_result(folder: StudyFolder, study: Study) -> Result:
    """Return the result from the files of all trials."""
    outcomes = {
        size: [runner.trial(folder, study, repeat, size) for repeat in range(study.repeats)]
        for size in study.sizes
    }
    return evaluate(study, outcomes, runner.wires(folder, study))


def _write(
    folder: StudyFolder, study: Study, spec: Recipe, with_plots: bool
) -> tuple[Result, list[Path]]:
    """Write the result of all trials so far; return it, and the files."""
    result = collect_result(folder, study)
    deviations = list(
        trial_recipe.deviations(spec, study.mode, study.batch, study.timing, study.threads)
    )
    return result, study_files.write(folder.path, result, deviations, with_plots)


def _print_result(result: Result, files: Sequence[Path]) -> None:
    """Print the table, the fits and the paths of files on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(tables.table(result))
    for name, text in tables.facts(result).items():
        click.echo(f"{name}: {text}")
    click.echo(f"written: {', '.join(map(str, files))}")
