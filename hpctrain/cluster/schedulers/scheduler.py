"""What hpctrain calls to render, submit, query and cancel jobs, the same for all schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpctrain.cluster.schedulers.dialect import REFUSED_FIELDS, UNTRIED, Dialect
from hpctrain.cluster.schedulers.flux import FLUX
from hpctrain.cluster.schedulers.pbs import PBS
from hpctrain.cluster.schedulers.submission import submit_script
from hpctrain.cluster.slurm import render as slurm_render
from hpctrain.cluster.slurm import submit as slurm_submit
from hpctrain.cluster.slurm.job import Job, check_job
from hpctrain.cluster.slurm.queries import JobId, JobState
from hpctrain.cluster.slurm.site import Site
from hpctrain.core.errors import UsageError
from hpctrain.core.names import pick


@dataclass(frozen=True)
class Scheduler:
    """A scheduler: its commands, and functions of one form."""

    name: str  #: of the command of hpctrain, and in jobs.json
    title: str
    submit_command: str
    cancel: tuple[str, ...]
    script_file: str
    refused: frozenset[str]  #: the fields of a job that it refuses
    check: Callable[[Job, Site | None], None]
    #: Returns the script of a job; the folder is its run's if it is submitted at once.
    render: Callable[[Job, Site | None, Path | None], str]
    submit: Callable[[str, Path], JobId]
    #: Returns the states of each job; the second list has older ones.
    query_jobs: Callable[[Iterable[str], Iterable[str]], dict[str, list[JobState]]]
    log_pattern: Callable[[str], str]
    note: str = ""  #: for help

    @property
    def has_arrays(self) -> bool:
        """Whether a sweep is one job with a task for each member, else a job for each."""
        return "sizes" not in self.refused

    def find_log(self, folder: Path, job: str) -> Path:
        """Return the file of a job's output; the file need not exist."""
        pattern = self.log_pattern(job)
        return next(folder.glob(pattern), folder / pattern)


SLURM = Scheduler(
    name="slurm",
    title="Slurm",
    submit_command="sbatch",
    cancel=("scancel",),
    script_file=slurm_submit.SCRIPT_FILE,
    refused=frozenset(),
    check=check_job,
    render=lambda job, site, folder: slurm_render.render(job, site, folder or Path("slurm")),
    submit=slurm_submit.submit_script,
    query_jobs=slurm_submit.query_jobs,
    log_pattern=lambda job: f"slurm-{job}.out",
)


def _of_dialect(dialect: Dialect) -> Scheduler:
    return Scheduler(
        name=dialect.name,
        title=dialect.title,
        submit_command=" ".join(dialect.submit),
        cancel=dialect.cancel,
        script_file=dialect.script_file,
        refused=frozenset((*REFUSED_FIELDS, "interactive")),
        check=dialect.check,
        render=dialect.render,
        submit=partial(submit_script, dialect),
        query_jobs=partial(slurm_submit.query_jobs, queries=(dialect.query, dialect.query)),
        log_pattern=dialect.log_pattern,
        note=f" ({UNTRIED})",
    )


SCHEDULERS: Mapping[str, Scheduler] = {
    scheduler.name: scheduler for scheduler in (SLURM, _of_dialect(PBS), _of_dialect(FLUX))
}


def scheduler_of(folder: Path) -> Scheduler:
    """Return the scheduler to which the jobs of a run were submitted; raise UsageError."""
    return pick(SCHEDULERS, slurm_submit.read_jobs_file(folder)[0], "scheduler of a run")


def must_have_no_active_job(scheduler: Scheduler, folder: Path, dependency: str) -> None:
    """Raise UsageError if a job of `folder` has not ended, unless the new job waits for its end.

    `dependency` is the new job's option of that name.
    """
    name, jobs = slurm_submit.read_jobs_file(folder)
    if jobs and name != scheduler.name:
        raise UsageError(
            f"--out {folder}: it holds jobs of {SCHEDULERS[name].title}, expected one of "
            f"{scheduler.title}; name another --out"
        )
    slurm_submit.must_have_no_active_job(folder, dependency, scheduler.query_jobs, scheduler.cancel)
