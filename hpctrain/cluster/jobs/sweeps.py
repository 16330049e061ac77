"""Sweeps as jobs: one array of Slurm with a task for each member, or a job for each.

DIR/sweep.json       see core/run_files/sweep_folder.py
DIR/rate=0.1/        the run of a member; where the scheduler has no arrays, with the job's files
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.jobs.request import (
    JobRequest,
    build_job,
    choose_engine,
    must_be_same_recipe,
)
from hpctrain.cluster.schedulers.scheduler import Scheduler
from hpctrain.cluster.slurm.job import Job, Task, job_name
from hpctrain.cluster.slurm.queries import NO_ANSWER, JobId
from hpctrain.cluster.slurm.site import Site
from hpctrain.cluster.slurm.submit import END_STATES, read_jobs_file
from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted
from hpctrain.core.run_files import run_folder, sweep_folder
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe
from hpctrain.training.sweep import Member, make_file, read_members

log = logging.getLogger(__name__)
Members = Mapping[int, Member]  #: by their numbers in the sweep


def read_sweep(request: JobRequest) -> list[Member]:
    """Return the members of the sweep that a request describes; empty for one run or a program."""

    def load(settings: Sequence[str]) -> Recipe:
        return recipe.load(request.recipe, choose_engine(replace(request, overrides=settings))[1])

    return [] if request.program else read_members(request.overrides, load)


def build(
    request: JobRequest, scheduler: Scheduler, interactive: bool = False
) -> tuple[Job, Site | None]:
    """Return the job of a request, of a sweep the array, and its site; raise UsageError."""
    members = read_sweep(request)
    if not members:
        return build_job(request, interactive, scheduler.check)
    if not scheduler.has_arrays:
        raise UsageError(
            f"{scheduler.title} gets a job for each member of a sweep: expected one value for each "
            f"key to render, seen several; `hpctrain {scheduler.name} submit` takes them"
        )
    return _build_array(request, scheduler, dict(enumerate(members)), interactive)


def _build_array(
    request: JobRequest, scheduler: Scheduler, members: Members, interactive: bool = False
) -> tuple[Job, Site | None]:
    jobs = {n: _build_member(request, scheduler, member) for n, member in members.items()}
    job, site = next(iter(jobs.values()))
    tasks = [Task(n, members[n].name, task_job.arguments) for n, (task_job, _) in jobs.items()]
    job = replace(job, arguments=(), tasks=tuple(tasks), interactive=interactive)
    scheduler.check(job, site)
    return job, site


def _build_member(
    request: JobRequest, scheduler: Scheduler, member: Member
) -> tuple[Job, Site | None]:
    return build_job(replace(request, overrides=member.settings), check=scheduler.check)


def submit(
    request: JobRequest, scheduler: Scheduler, members: Sequence[Member]
) -> Iterator[tuple[JobId, Path]]:
    """Submit the members that are neither done nor in the queue; yield each job and its folder.

    Raises UsageError before the first is submitted, also if there are none.
    """
    name = job_name(Job(request.recipe, name=request.job_name))
    folder = Path(request.out or run_folder.default_path(name))
    settings = [f"engine.kind={request.engine}"] * (request.engine is not None)
    settings += [f"run.epochs={request.epochs}"] * (request.epochs is not None)
    file = make_file(request.recipe, [*settings, *request.overrides], members)
    sweep_folder.must_fit(folder, file)
    missing = _find_missing(scheduler, folder, members)
    for member in missing.values():
        must_be_same_recipe(replace(request, overrides=member.settings), folder / member.name)
    if scheduler.has_arrays:
        job, site = _build_array(request, scheduler, missing)
        scripts = {folder: scheduler.render(replace(job, out=str(folder)), site, folder)}
    else:
        scripts = {
            run: scheduler.render(replace(job, out=str(run)), site, run)
            for member in missing.values()
            for run in [folder / member.name]
            for job, site in [_build_member(request, scheduler, member)]
        }
    for run, text in scripts.items():
        submitted_job = scheduler.submit(text, run)
        sweep_folder.write(folder, file)
        yield submitted_job, run


def _find_missing(scheduler: Scheduler, folder: Path, members: Sequence[Member]) -> Members:
    """Return the members of a sweep to submit; raise UsageError if there are none."""
    queued = {job.partition("_")[2] for job in _unfinished_jobs(scheduler, folder)}
    missing = {
        number: member
        for number, member in enumerate(members)
        if str(number) not in queued
        and not sweep_folder.is_done(folder / member.name)
        and not _unfinished_jobs(scheduler, folder / member.name)
    }
    if not missing:
        raise UsageError(f"--out {folder}: every member of this sweep is done, or in the queue")
    if len(missing) < len(members):
        log.info("%s of %s to do", counted(len(missing), "member"), len(members))
    return missing


def _unfinished_jobs(scheduler: Scheduler, folder: Path) -> list[str]:
    """Return the jobs of `folder` that have not ended, of an array its tasks."""
    name, jobs = read_jobs_file(folder)
    if jobs and name != scheduler.name:
        raise UsageError(f"--out {folder}: it holds jobs of {name}; name another --out")
    states = scheduler.query_jobs([], jobs)
    return [
        state.job
        for group in states.values()
        for state in group
        if state.state not in (*END_STATES, NO_ANSWER)
    ]
