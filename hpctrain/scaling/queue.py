"""Trials as jobs of Slurm: one for each size and repeat, all given to it at once, then awaited.

    DIR/trials/SIZE/repeat-0.job/    the script, the job's id, what the job said: cluster/submit.py

Who waits may be stopped: the jobs go on, and the next call finds them by their ids, waits for those
that are left and submits what is missing. A job that is stopped before its end is not resumed,
since its clocks would begin in the middle; its trial is run again. Nothing here knows an option of
sbatch: scripts come from cluster/slurm.py.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpctrain import rundir
from hpctrain.cluster import sbatch, submit
from hpctrain.cluster import site as sites
from hpctrain.cluster.job import Job
from hpctrain.cluster.job import check as must_be
from hpctrain.cluster.reasons import explained, lasting
from hpctrain.cluster.site import Site
from hpctrain.cluster.slurm import render
from hpctrain.cluster.submit import ENDED, POLL_S, State
from hpctrain.errors import HpctrainError
from hpctrain.recipe import Recipe
from hpctrain.scaling import changes, collect
from hpctrain.scaling.board import RUNNING, SUBMITTED, Standing
from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Folder, Key, Study
from hpctrain.scaling.teller import Teller

TIME = "0:30:00"  #: of each job, unless one is asked for
STEPS = 200  #: timed per trial: a pilot would have to queue for itself
LIMIT_S = 24 * 3600.0  #: who waits longer may call again
LEFT = "jobs go on: the same command collects them, and `scancel {jobs}` ends them"
SHARING = {"exclusive", "oversubscribe"}  #: options of sbatch by which the user decides
LATE_S = 10.0  #: a shared file system may show the files of a job that has ended so much later


def asked(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of the command line say about jobs."""
    return {
        "site": words["site"],
        "time": TIME if words["time"] is None else words["time"],
        "gpus_per_node": words["gpus_per_node"] or 0,
        "cpus_per_task": words["cpus_per_task"],
        "options": _alone(dict(sbatch.named(text) for text in words["options"])),
    }


def _alone(options: dict[str, str]) -> dict[str, str]:
    """Ask for nodes that no other job shares, another trial least of all: it would be timed too."""
    return options if SHARING & options.keys() else {**options, "exclusive": ""}


def must_render(study: Study) -> None:
    """Raise UsageError for a job that cannot be."""
    for size in study.sizes:
        name = _name(study, (0, size), Path("out"))
        must_be(_job(study, size, "recipe.toml", "out", name), _site(study))


def trials(
    folder: Folder, study: Study, spec: Recipe, missing: list[Key], teller: Teller
) -> Iterator[Trial | Gap]:
    """Submit what is missing and not under way; yield what became of each job."""
    waiting: dict[Key, int] = {}
    try:
        for key in missing:
            if (job := _given(folder, study, spec, key)) is None:
                yield _told(folder, study, key, teller)
            else:
                waiting[key] = job
                teller.update({key: Standing(SUBMITTED, job)})
        for key in _ended(waiting, folder, teller):
            yield _told(folder, study, key, teller, waiting.pop(key))
    except KeyboardInterrupt:
        if waiting:
            jobs = " ".join(map(str, waiting.values()))
            teller.say(logging.WARNING, LEFT.format(jobs=jobs))
        raise


def _given(folder: Folder, study: Study, spec: Recipe, key: Key) -> int | None:
    """Return the job of a trial, a new one if none is under way; None where it is refused."""
    out = folder.trial(key[1], key[0])
    try:
        return _under_way(study, key, out) or _submitted(folder, study, spec, key, out)
    except HpctrainError as error:  # of this size alone, it may be; so is an sbatch too slow
        out.parent.mkdir(parents=True, exist_ok=True)
        collect.log_of(out).write_text(f"hpctrain: {' '.join(str(error).split())}\n")
        return None


def _told(
    folder: Folder, study: Study, key: Key, teller: Teller, job: int | None = None
) -> Trial | Gap:
    found = collect.trial(folder.trial(key[1], key[0]), study.timing)
    teller.update({key: Standing.of(found, job)})
    return found


def standing(out: Path, state: State) -> Standing:
    """Return how a trial stands whose job Slurm tells of."""
    word = state.state.lower()
    step = collect.step(out) if word == RUNNING else None
    why = "" if word == RUNNING else explained(state.reason)
    return Standing(word, int(state.job), step, why)


def seen(folder: Folder, study: Study) -> dict[Key, Standing]:
    """Return how each trial stands by its files and by Slurm's word, for who only looks."""
    outs = {key: folder.trial(key[1], key[0]) for key in study.trials}
    found = {key: collect.trial(out, study.timing) for key, out in outs.items()}
    jobs = {key: known[-1] for key, out in outs.items() if (known := _jobs(out))}
    states = submit.hear([job for key, job in jobs.items() if isinstance(found[key], Gap)])
    state = {key: states[job][0] for key, job in jobs.items() if job in states}
    return {k: _seen(out, found[k], jobs.get(k), state.get(k)) for k, out in outs.items()}


def _jobs(out: Path) -> list[int]:
    """Return the jobs that were to make the run `out`, the latest last."""
    return submit.jobs_of(collect.job_of(out))


def _seen(out: Path, found: Trial | Gap, job: int | None, state: State | None) -> Standing:
    if state is not None and state.state not in ENDED:
        return standing(out, state)
    begun = isinstance(found, Trial) or job is not None or collect.log_of(out).exists()
    return Standing.of(found, job) if begun else Standing()


def _under_way(study: Study, key: Key, out: Path) -> int | None:
    """Return the job that makes the run `out` and has not ended."""
    kept = collect.job_of(out)
    known = submit.jobs_of(kept)
    if not known and kept.exists():  # whoever gave it to Slurm was killed before the id came back
        known = submit.named(_name(study, key, out))
        rundir.write_json(kept / submit.JOBS, {"jobs": known})
    return known[-1] if known and submit.heard(known[-1])[0].state not in ENDED else None


def _submitted(folder: Folder, study: Study, spec: Recipe, key: Key, out: Path) -> int:
    """Give a new job to Slurm; return its id. What an earlier one left is removed."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(collect.job_of(out), ignore_errors=True)
    collect.log_of(out).unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    timed = changes.trial(spec, study.mode, study.batch, key[1], study.timing)
    file = folder.recipe(key[1], timed.toml()).absolute()
    job = _job(study, key[1], str(file), str(out.absolute()), _name(study, key, out))
    with _undisturbed():
        return submit.submit(render(job, _site(study)), collect.job_of(out))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let a Ctrl-C wait until the id of a job is written down; sbatch is to get none of it."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits that
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _name(study: Study, key: Key, out: Path) -> str:
    """Return the name of a job that no other trial has, of no other study either."""
    mark = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:8]
    plain = re.sub(r"[^\w.-]", "_", study.name)  # squeue would take a comma for two names
    return f"scale-{plain}-{key[1].ranks}-{key[0]}-{mark}"


def _job(study: Study, size: Size, recipe: str, out: str, name: str) -> Job:
    told = dict(study.job)
    told.pop("site")
    if told["gpus_per_node"]:  # a rank takes a GPU, and a small size does not take them all
        told["gpus_per_node"] = size.per_node
    return Job(recipe, size.nodes, size.per_node, name=name, out=out, max_restarts=0, **told)


def _site(study: Study) -> Site | None:
    name = study.job["site"]
    return None if name is None else sites.load(name)


def _ended(waiting: Mapping[Key, int], folder: Folder, teller: Teller) -> Iterator[Key]:
    """Yield trials as nobody need wait for their jobs any more; after LIMIT_S all that are left."""
    left, deadline, pause = dict(waiting), time.monotonic() + LIMIT_S, 0.5
    outs = {key: folder.trial(key[1], key[0]) for key in waiting}
    while left:
        told = submit.hear(left.values())
        states = {key: told[job][0] for key, job in left.items()}
        over = time.monotonic() > deadline
        gone = [key for key, state in states.items() if over or _over(state)]
        teller.update({k: standing(outs[k], states[k]) for k in left if k not in gone})
        for key in gone:
            del left[key]
            _note(outs[key], states[key])
            yield key
        if left:
            time.sleep(pause)
            pause = min(1.3 * pause, POLL_S)


def _over(state: State) -> bool:
    """Return whether nobody need wait for a job: it has ended, or it will not start as it is."""
    return state.state in ENDED or (state.state == "PENDING" and lasting(state.reason))


def _note(out: Path, state: State) -> None:
    """Keep Slurm's word where a job's own files tell nothing; drop its checkpoint."""
    deadline = time.monotonic() + LATE_S * (state.state == "COMPLETED")
    while not (out / collect.SUMMARY).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    why = f" ({explained(state.reason)})" if state.reason else ""
    end = "" if state.state in ENDED else f"; `scancel {state.job}` ends it"
    text = f"hpctrain: Slurm's job {state.job} is {state.state}{why}{end}\n"
    collect.log_of(out).write_text(text)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
