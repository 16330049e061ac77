"""Trials as jobs of Slurm: one for each size and repeat, all given to it at once, then awaited.

    DIR/trials/SIZE/repeat-0.job/    the script, the job's id, what the job said: cluster/submit.py

Who waits may be stopped: the jobs go on, and the next call finds them by their ids, waits for those
that are left and submits what is missing. A job that is stopped before its end is not resumed,
since its clocks would begin in the middle; its trial is run again. Nothing here knows an option of
sbatch: scripts come from cluster/slurm.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster import sbatch, submit
from hpctrain.cluster import site as sites
from hpctrain.cluster.job import Job
from hpctrain.cluster.job import check as must_be
from hpctrain.cluster.reasons import explained
from hpctrain.cluster.site import Site
from hpctrain.cluster.slurm import render
from hpctrain.cluster.submit import ENDED, POLL_S, State
from hpctrain.errors import HpctrainError
from hpctrain.recipe import Recipe
from hpctrain.scaling import changes, collect
from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Folder, Study
from hpctrain.scaling.teller import Teller

TIME = "0:30:00"  #: of each job, unless one is asked for
STEPS = 200  #: timed per trial: a pilot would have to queue for itself
LIMIT_S = 24 * 3600.0  #: who waits longer may call again
LATE_S = 10.0  #: a shared file system may show the files of a job that has ended so much later
Key = tuple[int, Size]


def asked(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options of the command line say about jobs."""
    return {
        "site": words["site"],
        "time": TIME if words["time"] is None else words["time"],
        "gpus_per_node": words["gpus_per_node"] or 0,
        "cpus_per_task": words["cpus_per_task"],
        "options": dict(sbatch.named(text) for text in words["options"]),
    }


def must_render(study: Study) -> None:
    """Raise UsageError for a job that cannot be."""
    for size in study.sizes:
        must_be(_job(study, size, "recipe.toml", "out"), _site(study))


def trials(
    folder: Folder, study: Study, spec: Recipe, missing: list[Key], teller: Teller
) -> Iterator[Trial | Gap]:
    """Submit what is missing and not under way; yield what became of each job."""
    waiting: dict[Key, int] = {}
    for repeat, size in missing:
        out = folder.trial(size, repeat)
        try:
            waiting[repeat, size] = _under_way(out) or _submitted(folder, study, spec, size, out)
        except HpctrainError as error:  # of this size alone, it may be; so is an sbatch too slow
            out.parent.mkdir(parents=True, exist_ok=True)
            collect.log_of(out).write_text(f"hpctrain: {' '.join(str(error).split())}\n")
            yield _told(folder, study, (repeat, size), teller)
    for key in _ended(waiting, folder, teller):
        yield _told(folder, study, key, teller)


def _told(folder: Folder, study: Study, key: Key, teller: Teller) -> Trial | Gap:
    repeat, size = key
    found = collect.trial(folder.trial(size, repeat), study.timing)
    teller.end(f"{size.said}, repeat {repeat + 1} of {study.repeats}", found)
    return found


def _under_way(out: Path) -> int | None:
    """Return the job that makes the run `out` and has not ended."""
    known = submit.jobs_of(collect.job_of(out))
    return known[-1] if known and submit.heard(known[-1])[0].state not in ENDED else None


def _submitted(folder: Folder, study: Study, spec: Recipe, size: Size, out: Path) -> int:
    """Give a new job to Slurm; return its id. What an earlier one left is removed."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(collect.job_of(out), ignore_errors=True)
    collect.log_of(out).unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    timed = changes.trial(spec, study.mode, study.batch, size, study.timing)
    file = folder.recipe(size, timed.toml()).absolute()
    text = render(_job(study, size, str(file), str(out.absolute())), _site(study))
    return submit.submit(text, collect.job_of(out))


def _job(study: Study, size: Size, recipe: str, out: str) -> Job:
    told = dict(study.job)
    told.pop("site")
    if told["gpus_per_node"]:  # a rank takes a GPU, and a small size does not take them all
        told["gpus_per_node"] = size.per_node
    name = f"scale-{study.name}"
    return Job(recipe, size.nodes, size.per_node, name=name, out=out, max_restarts=0, **told)


def _site(study: Study) -> Site | None:
    name = study.job["site"]
    return None if name is None else sites.load(name)


def _ended(waiting: dict[Key, int], folder: Folder, teller: Teller) -> Iterator[Key]:
    """Yield the trials whose jobs have ended, as they do; after LIMIT_S all that are left."""
    left, deadline, pause = dict(waiting), time.monotonic() + LIMIT_S, 0.5
    while left:
        states = {key: submit.heard(job)[0] for key, job in left.items()}
        over = time.monotonic() > deadline
        for (repeat, size), state in states.items():
            if state.state in ENDED or over:
                del left[repeat, size]
                _note(folder.trial(size, repeat), state)
                yield repeat, size
        if left:
            teller.news(_summary([states[key] for key in left]))
            time.sleep(pause)
            pause = min(1.3 * pause, POLL_S)


def _note(out: Path, state: State) -> None:
    """Keep Slurm's word where a job's own files tell nothing; drop its checkpoint."""
    deadline = time.monotonic() + LATE_S * (state.state == "COMPLETED")
    while not (out / collect.SUMMARY).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    why = f" ({state.reason})" if state.reason else ""
    collect.log_of(out).write_text(f"hpctrain: Slurm's job {state.job} is {state.state}{why}\n")
    shutil.rmtree(out / "checkpoints", ignore_errors=True)


def _summary(states: list[State]) -> str:
    """Return how many jobs are in which state, and why they do not start."""
    names = [one.state for one in states]
    counts = ", ".join(f"{names.count(name)} {name.lower()}" for name in dict.fromkeys(names))
    idle = [one for one in states if one.state in ("PENDING", "NO ANSWER") and one.reason]
    whys = dict.fromkeys(explained(one.reason) for one in idle)
    return f"jobs: {counts}" + (f" ({'; '.join(whys)})" if whys else "")
