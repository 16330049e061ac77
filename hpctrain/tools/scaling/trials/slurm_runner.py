"""Trials as jobs of Slurm: one for each size and repeat, all given to it at once, then awaited.

    DIR/trials/SIZE/repeat-0.job/    script, id and output of the job: cluster/slurm/submit.py

The waiting process may be stopped: the jobs go on, and the next call finds them by their ids, waits
for those that are left and submits missing ones. A job that is stopped before its end is not
resumed, since its clocks would begin in the middle; its trial is run again. Nothing here knows an
option of sbatch: scripts come from cluster/slurm/render.py.
"""

from __future__ import annotations

import hashlib
import logging
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain.cluster.slurm import sbatch, submit
from hpctrain.cluster.slurm.job import Job, check_job
from hpctrain.cluster.slurm.queries import JobState
from hpctrain.cluster.slurm.reasons import explain_reason, is_permanent
from hpctrain.cluster.slurm.render import render
from hpctrain.cluster.slurm.site import Site, load_site
from hpctrain.cluster.slurm.submit import END_STATES, POLL_INTERVAL_S
from hpctrain.core import opening
from hpctrain.core.errors import HpctrainError
from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling import collect
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output.live_table import RUNNING, SUBMITTED, LiveView, TrialStatus
from hpctrain.tools.scaling.study import Study, StudyFolder, TrialKey
from hpctrain.tools.scaling.subject import Subject
from hpctrain.tools.scaling.trial_recipe import Size

TIME = "0:30:00"  #: of each job, unless one is asked for
STEPS = 200  #: timed per trial: a pilot would have to queue for itself
LIMIT_S = 24 * 3600.0  #: to wait longer, call again
JOBS_GO_ON = "jobs go on: the same command collects them, and `scancel {jobs}` ends them"
SHARING = {"exclusive", "oversubscribe"}  #: options of sbatch by which the user decides
LATE_S = 10.0  #: a shared file system may show the files of a job that has ended so much later


def job_options(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for jobs from the command line."""
    options = dict(sbatch.parse_option(text) for text in words["options"])
    # No other job may share the nodes, another trial least of all: it would be timed too.
    exclusive = {} if SHARING & options.keys() else {"exclusive": ""}
    return {
        "site": words["site"],
        "time": TIME if words["time"] is None else words["time"],
        "gpus_per_node": words["gpus_per_node"] or 0,
        "cpus_per_task": words["cpus_per_task"],
        "options": options | exclusive,
    }


def must_render(study: Study) -> None:
    """Raise UsageError for an impossible job."""
    for size in study.sizes:
        name = _job_name(study, (0, size), Path("out"))
        check_job(_job(study, size, "recipe.toml", "out", name), _site(study))


def trials(
    folder: StudyFolder, study: Study, subject: Subject, missing: list[TrialKey], view: LiveView
) -> Iterator[TrialResult | Gap]:
    """Submit missing trials that are not under way; yield the outcome of each."""
    waiting: dict[TrialKey, int] = {}
    try:
        for key in missing:
            if (job := _job_for(folder, study, subject, key)) is None:
                yield _outcome(folder, study, key, view)
            else:
                waiting[key] = job
                view.update({key: TrialStatus(SUBMITTED, job)})
        for key in _await_ends(waiting, folder, view):
            yield _outcome(folder, study, key, view, waiting.pop(key))
    except KeyboardInterrupt:
        if waiting:
            jobs = " ".join(map(str, waiting.values()))
            view.log_line(logging.WARNING, JOBS_GO_ON.format(jobs=jobs))
        raise


def _job_for(folder: StudyFolder, study: Study, subject: Subject, key: TrialKey) -> int | None:
    """Return the job of a trial, a new one if none is under way; None where it is refused."""
    out = folder.trial(key[1], key[0])
    job_folder = collect.job_folder(out)
    folder.make_folders_of(job_folder / submit.JOBS_FILE if job_folder.exists() else job_folder)
    try:
        return _open_job(study, key, out) or _submit_trial(folder, study, subject, key, out)
    except HpctrainError as error:  # of this size alone, it may be; so is an sbatch too slow
        collect.write_log(out, " ".join(str(error).split()))
        return None


def _outcome(
    folder: StudyFolder, study: Study, key: TrialKey, view: LiveView, job: int | None = None
) -> TrialResult | Gap:
    outcome = collect.read_trial(folder.trial(key[1], key[0]), study.timing)
    view.update({key: TrialStatus.from_outcome(outcome, job)})
    return outcome


def status(out: Path, state: JobState) -> TrialStatus:
    """Return the status of a trial from the state of its job."""
    state_name = state.state.lower()
    step = collect.read_last_step(out) if state_name == RUNNING else None
    reason = "" if state_name == RUNNING else explain_reason(state.reason)
    return TrialStatus(state_name, int(state.job), step, reason)


def current_statuses(folder: StudyFolder, study: Study) -> dict[TrialKey, TrialStatus]:
    """Return the status of each trial by its files and Slurm, for a process that only looks."""
    run_folders = {key: folder.trial(key[1], key[0]) for key in study.trials}
    outcomes = {key: collect.read_trial(out, study.timing) for key, out in run_folders.items()}
    jobs = {key: ids[-1] for key, out in run_folders.items() if (ids := _jobs(out))}
    states = submit.query_jobs([job for key, job in jobs.items() if isinstance(outcomes[key], Gap)])
    state = {key: states[job][0] for key, job in jobs.items() if job in states}
    return {
        k: _current_status(out, outcomes[k], jobs.get(k), state.get(k))
        for k, out in run_folders.items()
    }


def _jobs(out: Path) -> list[int]:
    """Return the jobs submitted for the run `out`, the latest last."""
    return submit.read_job_ids(collect.job_folder(out))


def _current_status(
    out: Path, outcome: TrialResult | Gap, job: int | None, state: JobState | None
) -> TrialStatus:
    if state is not None and state.state not in END_STATES:
        return status(out, state)
    has_begun = (
        isinstance(outcome, TrialResult) or job is not None or collect.log_path(out).exists()
    )
    return TrialStatus.from_outcome(outcome, job) if has_begun else TrialStatus()


def _open_job(study: Study, key: TrialKey, out: Path) -> int | None:
    """Return the job of the run `out` that has not ended, None if there is none."""
    job_folder = collect.job_folder(out)
    ids = submit.read_job_ids(job_folder)
    if not ids and job_folder.exists():  # the submitting process was killed before the id came back
        ids = submit.find_jobs_by_name(_job_name(study, key, out))
        run_folder.write_json(job_folder / submit.JOBS_FILE, {"jobs": ids})
    return (
        ids[-1]
        if ids and submit.query_jobs([ids[-1]])[ids[-1]][0].state not in END_STATES
        else None
    )


def _submit_trial(
    folder: StudyFolder, study: Study, subject: Subject, key: TrialKey, out: Path
) -> int:
    """Submit a new job to Slurm; return its id. Files of an earlier one are removed."""
    folder.make_room(out, collect.job_folder(out))
    opening.remove(collect.log_path(out), collect.LEVELS)
    (_, file, *_), _ = subject.command(folder, study, key[1], out, study.timing)
    job = _job(study, key[1], file, str(out.absolute()), _job_name(study, key, out))
    with _defer_interrupt():
        jobs = collect.job_folder(out)
        return submit.submit_script(render(job, _site(study), jobs), jobs)


@contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Defer Ctrl-C until the id of a job is written down, and keep it from sbatch."""
    interrupts: list[int] = []
    old_handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits that
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, old_handler)
    if interrupts:
        raise KeyboardInterrupt


def _job_name(study: Study, key: TrialKey, out: Path) -> str:
    """Return a job name that is unique among the trials of every study."""
    mark = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:8]
    safe_name = re.sub(r"[^\w.-]", "_", study.name)  # squeue would take a comma for two names
    return f"scale-{safe_name}-{key[1].ranks}-{key[0]}-{mark}"


def _job(study: Study, size: Size, recipe: str, out: str, name: str) -> Job:
    options = dict(study.job)
    options.pop("site")
    if options["gpus_per_node"]:  # a rank takes a GPU, and a small size does not take them all
        options["gpus_per_node"] = size.per_node
    options |= {"max_restarts": 0, "relaunches": 0}  # a trial with a restart measures nothing
    options |= {"nodes": size.nodes, "tasks_per_node": size.per_node, "name": name}
    return Job(recipe, out=out, **options)


def _site(study: Study) -> Site | None:
    name = study.job["site"]
    return None if name is None else load_site(name)


def _await_ends(
    waiting: Mapping[TrialKey, int], folder: StudyFolder, view: LiveView
) -> Iterator[TrialKey]:
    """Yield trials as their jobs end or cannot start; after LIMIT_S all the others."""
    jobs_by_trial, deadline, pause = dict(waiting), time.monotonic() + LIMIT_S, 0.5
    run_folders = {key: folder.trial(key[1], key[0]) for key in waiting}
    while jobs_by_trial:
        states_of = submit.query_jobs(jobs_by_trial.values())
        states = {key: states_of[job][0] for key, job in jobs_by_trial.items()}
        is_over = time.monotonic() > deadline
        ended_keys = [
            key
            for key, state in states.items()
            if is_over
            or state.state in END_STATES
            or (state.state == "PENDING" and is_permanent(state.reason))  # cannot start as it is
        ]
        view.update(
            {k: status(run_folders[k], states[k]) for k in jobs_by_trial if k not in ended_keys}
        )
        for key in ended_keys:
            del jobs_by_trial[key]
            _log_end(run_folders[key], states[key])
            yield key
        if jobs_by_trial:
            time.sleep(pause)
            pause = min(1.3 * pause, POLL_INTERVAL_S)


def _log_end(out: Path, state: JobState) -> None:
    """Write the job's state in Slurm to the log, in case its files hold none; drop checkpoints."""
    deadline = time.monotonic() + LATE_S * (state.state == "COMPLETED")
    while not (out / run_folder.SUMMARY).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    reason = f" ({explain_reason(state.reason)})" if state.reason else ""
    end = "" if state.state in END_STATES else f"; `scancel {state.job}` ends it"
    collect.write_log(out, f"Slurm's job {state.job} is {state.state}{reason}{end}")
    collect.remove_checkpoints(out)
