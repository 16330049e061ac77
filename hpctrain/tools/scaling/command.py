"""`hpctrain scale`: from the command line to a study that is run, evaluated, shown and saved.

The output files are each written whole or not at all, at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cluster.jobs.request import must_have_one_subject
from hpctrain.cluster.launch import MpiInstallation
from hpctrain.core import atomic, progress
from hpctrain.core.errors import UsageError
from hpctrain.core.fitted_table import PlainConsole, fit_table, print_table
from hpctrain.core.printing import say
from hpctrain.core.run_files import folder_lock, run_folder
from hpctrain.core.strict_json import to_json
from hpctrain.tools.scaling import trial_recipe
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output import live_table, tables
from hpctrain.tools.scaling.output.live_table import LiveView
from hpctrain.tools.scaling.results import Result, evaluate
from hpctrain.tools.scaling.study import Study, StudyFolder, extend_study, lock_folder
from hpctrain.tools.scaling.subject import Subject, make_subject
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tools.scaling.trials import local_runner, runner, slurm_runner
from hpctrain.transport import machine
from hpctrain.transport.placement import core_binding

DEFAULT_WIDTH = 200  #: of tables where there is no terminal
EXIT_CODE_GAPS = 1  #: the exit code of a study in which something is missing
log = logging.getLogger(__name__)
MISSING = (
    "no plots and no report.html: they are drawn with matplotlib and jinja2; run: "
    "pip install 'hpctrain[report]', then the same command again"
)


def scale(options: Mapping[str, Any]) -> int:
    """Run the missing trials of the study that `options` ask for; return the exit code.

    Raises UsageError before anything is run.
    """
    must_have_one_subject(options["recipe"], options["program"])
    subject = make_subject(options)
    requested_study = make_study(subject, options)
    folder_path = options["out"] or run_folder.default_path(
        f"scale-{requested_study.name}-{requested_study.mode}"
    )
    with_plots = can_draw()
    with _lock_or_show(folder_path) as folder:
        study = extend_study(requested_study, folder.load(), folder_path)
        folder.save(study)
        try:
            study = _run_missing_trials(folder, study, subject)
        except KeyboardInterrupt:
            if (partial_study := folder.load()) and partial_study.steps:
                _write_result(folder, partial_study, subject, with_plots)
            raise
        result, files = _write_result(folder, study, subject, with_plots)
    print_table(tables.table(result), DEFAULT_WIDTH)
    for name, text in tables.facts(result).items():
        say(f"{name}: {text}")
    say(f"written: {', '.join(map(str, files))}")
    return EXIT_CODE_GAPS if any(row.get("repeats_missing") for row in result.rows) else 0


@contextmanager
def _lock_or_show(folder_path: Path) -> Iterator[StudyFolder]:
    """Lock the folder of a study; if another process has locked it, show its progress."""
    try:
        with lock_folder(folder_path) as folder:
            yield folder
    except folder_lock.LockedError:
        _print_progress(StudyFolder(folder_path))
        raise
    except KeyboardInterrupt:
        log.warning(
            "stopped: results so far are in %s; the same command with this --out goes on there",
            folder_path,
        )
        raise


def make_study(subject: Subject, options: Mapping[str, Any]) -> Study:
    """Return the study that `options` ask for; raise UsageError for one that cannot run."""
    platform, mode = options["on"], options["mode"]
    link = options["link"] or ("1gbit" if platform == "netlab" else None)
    ranks_per_node = options["ranks_per_node"]
    ranks_per_node = (
        (options["gpus_per_node"] or None) if ranks_per_node is None else ranks_per_node
    )
    size_list = trial_recipe.parse_sizes(
        options["ranks"], options["nodes"], ranks_per_node, platform
    )
    _check_slurm_options(options)
    _check_gpus_per_node(options["gpus_per_node"], size_list)
    for option in ("repeats", "steps"):
        if options[option] is not None and options[option] < 1:
            raise UsageError(f"--{option}: expected 1 or more, seen {options[option]}")
    batch, gradient_bytes = subject.measure(mode, size_list)
    mpi = local_runner.must_work(platform, size_list, link)
    cores = None if platform == "slurm" else len(os.sched_getaffinity(0))
    # A rank's share of the cores when the largest size runs.
    threads = None if cores is None else max(1, cores // max(size_list).ranks)
    study = Study(
        name=subject.name,
        mode=mode,
        on=platform,
        link=link,
        sizes=tuple(size_list),
        repeats=options["repeats"],
        tables=subject.tables,
        batch=batch,
        gradient_bytes=gradient_bytes,
        machine=_machine_facts(mpi),
        threads=core_binding.user_blas_threads(os.environ) or threads,
        cores=cores,
        steps=options["steps"] or (slurm_runner.STEPS if platform == "slurm" else None),
        job=slurm_runner.job_options(options) if platform == "slurm" else {},
    )
    if platform == "slurm":
        slurm_runner.must_render(study)
    return study


def _check_slurm_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of jobs where there are none."""
    for name in ("site", "time", "gpus_per_node", "cpus_per_task", "options"):
        if options[name] not in (None, ()) and options["on"] != "slurm":
            option = "--option" if name == "options" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is about jobs of Slurm; seen --on {options['on']}")


def _check_gpus_per_node(gpus: int | None, size_list: Sequence[Size]) -> None:
    for size in size_list:
        if gpus and size.per_node > gpus:
            raise UsageError(
                f"{size.text}: {size.per_node} ranks on a node, and --gpus-per-node {gpus}: a rank "
                "takes a GPU; ask for as many"
            )


def _machine_facts(mpi: MpiInstallation | None) -> dict[str, Any]:
    """Return the facts of this machine that results depend on."""
    facts = machine.facts([os.uname().nodename], "none")
    for name in ("cores_per_rank", "blas_threads", "hosts"):  # of this process: no rank
        facts.pop(name)
    facts.pop("date")  # a study may go on another day
    if mpi is None:  # jobs run on other nodes than this one
        return {"versions": facts["versions"]}
    return facts | {"mpi": f"{mpi.vendor} {mpi.version}"}


def _print_progress(folder: StudyFolder) -> None:
    """Show the progress of a study that another process works on."""
    study = folder.load()
    if study is not None:
        read_statuses = (
            slurm_runner.current_statuses if study.on == "slurm" else runner.current_statuses
        )
        console = progress.console()
        status_table = live_table.table(study, read_statuses(folder, study), tables.title(study))
        console = console if console.is_terminal else PlainConsole(stderr=True, width=DEFAULT_WIDTH)
        console.print(fit_table(status_table, console))


def _run_missing_trials(folder: StudyFolder, study: Study, subject: Subject) -> Study:
    """Run the missing trials; return the study with its number of steps."""
    is_known = bool(study.steps and study.gradient_bytes)
    if is_known and not runner.missing_trials(folder, study):
        return study
    with LiveView(study) as view:
        _log_study_folder(folder, study, view)
        if not is_known:
            study = runner.run_pilots(folder, study, subject, view)
            folder.save(study)
        for deviation in subject.deviations(study):
            view.log_line(logging.INFO, f"# {deviation}")
        view.set_study(study, runner.statuses(folder, study))
        for _ in _start_trials(folder, study, subject, view):
            pass
    return study


def _log_study_folder(folder: StudyFolder, study: Study, view: LiveView) -> None:
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


def _start_trials(
    folder: StudyFolder, study: Study, subject: Subject, view: LiveView
) -> Iterator[TrialResult | Gap]:
    if study.on == "slurm":
        return slurm_runner.trials(
            folder, study, subject, runner.missing_trials(folder, study), view
        )
    runner.measure_links(folder, study, view)
    return runner.trials(folder, study, subject, view)


def collect_result(folder: StudyFolder, study: Study) -> Result:
    """Return the result from the trials' files."""
    outcomes = {
        size: [runner.trial(folder, study, repeat, size) for repeat in range(study.repeats)]
        for size in study.sizes
    }
    return evaluate(study, outcomes, runner.wires(folder, study))


def _write_result(
    folder: StudyFolder, study: Study, subject: Subject, with_plots: bool
) -> tuple[Result, list[Path]]:
    """Write the result of the trials so far; return it, and the files."""
    result = collect_result(folder, study)
    return result, write(folder.path, result, [*subject.deviations(study)], with_plots)


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
