"""`hpctrain scale`: from what was typed to a study that is run, collected, shown and kept."""

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

from hpctrain import machine, progress, recipe, rundir, runs
from hpctrain.cluster.launch import Mpi
from hpctrain.errors import UsageError
from hpctrain.gradients.precision import master
from hpctrain.recipe import Recipe
from hpctrain.scaling import board, changes, conduct, output, places, queue, show, sizes
from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.results import Result, result
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Folder, Study, claimed, joined
from hpctrain.scaling.teller import Teller
from hpctrain.transport import bind

WIDTH = 200  #: of tables where there is no terminal
log = logging.getLogger(__name__)
GAPS = 1  #: the exit code of a study in which something is missing
Words = Mapping[str, Any]


def scale(words: Words) -> int:
    """Run what is missing of the study that `words` ask for; return the exit code.

    Raises UsageError before anything is run.
    """
    spec = recipe.load(words["recipe"], words["sets"])
    asked = study_of(spec, words)
    where = words["out"] or rundir.default_path(f"scale-{asked.name}-{asked.mode}")
    drawn = output.can_draw()
    with _held(where) as folder:
        study = joined(asked, folder.known(), where)
        folder.save(study)
        try:
            study = _measured(folder, study, spec)
        except KeyboardInterrupt:
            if (so_far := folder.known()) and so_far.steps:
                _written(folder, so_far, spec, drawn)
            raise
        found, files = _written(folder, study, spec, drawn)
    _show(found, files)
    return GAPS if any(row.get("repeats_missing") for row in found.rows) else 0


@contextmanager
def _held(where: Path) -> Iterator[Folder]:
    """Hold the folder of a study; where another process does, show how things stand."""
    try:
        with claimed(where) as folder:
            yield folder
    except rundir.HeldError:
        _look(Folder(where))
        raise
    except KeyboardInterrupt:
        log.warning("stopped: what there is lies in %s, and the same --out goes on there", where)
        raise


def study_of(spec: Recipe, words: Words) -> Study:
    """Return the study that `words` ask for; raise UsageError where it cannot be."""
    on, mode = words["on"], words["mode"]
    link = words["link"] or ("1gbit" if on == "netlab" else None)
    per_node = words["ranks_per_node"]
    per_node = (words["gpus_per_node"] or None) if per_node is None else per_node
    some = sizes.parse(words["ranks"], words["nodes"], per_node, on)
    _must_be_slurms(words)
    _must_have_gpus(words["gpus_per_node"], some)
    for option in ("repeats", "steps"):
        if words[option] is not None and words[option] < 1:
            raise UsageError(f"--{option}: expected 1 or more, seen {words[option]}")
    batch = changes.base_batch(spec, mode, some)
    changes.must_divide(spec, mode, batch, some)
    mpi = places.must_work(on, some, link)
    cores = None if on == "slurm" else len(os.sched_getaffinity(0))
    study = Study(
        name=spec.run.name,
        mode=mode,
        on=on,
        link=link,
        sizes=tuple(some),
        repeats=words["repeats"],
        tables=spec.tables,
        batch=batch,
        gradient_bytes=_gradient_bytes(spec),
        machine=_facts(mpi),
        threads=_threads(cores, max(some).ranks),
        cores=cores,
        steps=words["steps"] or (queue.STEPS if on == "slurm" else None),
        job=queue.asked(words) if on == "slurm" else {},
    )
    if on == "slurm":
        queue.must_render(study)
    return study


def _must_be_slurms(words: Words) -> None:
    """Raise UsageError for options of jobs where there are none."""
    for name in ("site", "time", "gpus_per_node", "cpus_per_task", "options"):
        if words[name] not in (None, ()) and words["on"] != "slurm":
            option = "--option" if name == "options" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is about jobs of Slurm; seen --on {words['on']}")


def _must_have_gpus(gpus: int | None, some: Sequence[Size]) -> None:
    for size in some:
        if gpus and size.per_node > gpus:
            raise UsageError(
                f"{size.said}: {size.per_node} ranks on a node, and --gpus-per-node {gpus}: a rank "
                "takes a GPU; ask for as many"
            )


def _gradient_bytes(spec: Recipe) -> int:
    """Return the bytes of a gradient, as it is summed."""
    model = runs.build_model(spec, spec.data.load(spec.run.seed))
    count = sum(math.prod(one.shape) for one in model.parameters.values())
    return int(count * master(spec.run.precision).itemsize)


def _threads(cores: int | None, most: int) -> int | None:
    """Return the BLAS threads of a rank: as many as it has cores where there are `most` ranks."""
    fair = None if cores is None else max(1, cores // most)
    return bind.asked_threads(os.environ) or fair


def _facts(mpi: Mpi | None) -> dict[str, Any]:
    """Return the facts of this machine that results depend on."""
    facts = machine.facts([os.uname().nodename], "none")
    for name in ("cores_per_rank", "blas_threads", "hosts"):  # of this process: no rank
        facts.pop(name)
    facts.pop("date")  # a study may go on another day
    if mpi is None:  # jobs run on other nodes than this one
        return {"versions": facts["versions"]}
    return facts | {"mpi": f"{mpi.vendor} {mpi.version}"}


def _look(folder: Folder) -> None:
    """Show how a study stands that another process works on."""
    study = folder.known()
    if study is not None:
        seen = queue.seen if study.on == "slurm" else conduct.seen
        console = progress.console()
        drawn = board.table(study, seen(folder, study), show.title(study))
        (console if console.is_terminal else Console(stderr=True, width=WIDTH)).print(drawn)


def _measured(folder: Folder, study: Study, spec: Recipe) -> Study:
    """Run what is missing; return the study, whose steps are known now."""
    if study.steps and not conduct.missing(folder, study):
        return study
    with Teller(study) as teller:
        _say_where(folder, study, teller)
        if study.steps is None:
            study = conduct.piloted(folder, study, spec, teller)
            folder.save(study)
        for told in changes.told(spec, study.mode, study.batch, study.timing, study.threads):
            teller.say(logging.INFO, f"# {told}")
        teller.expect(study, conduct.standings(folder, study))
        for _ in _trials(folder, study, spec, teller):
            pass
    return study


def _say_where(folder: Folder, study: Study, teller: Teller) -> None:
    teller.say(logging.INFO, f"# in {folder.path}: the same command with that --out goes on there")
    for size in study.sizes:
        if study.share(size) > 1:
            teller.say(
                logging.WARNING,
                f"{size.said}: oversubscribed, {study.share(size):.3g} ranks share a core: marked "
                "in the table, and left out of fits where other sizes do",
            )


def _trials(folder: Folder, study: Study, spec: Recipe, teller: Teller) -> Iterator[Trial | Gap]:
    if study.on == "slurm":
        return queue.trials(folder, study, spec, conduct.missing(folder, study), teller)
    conduct.links(folder, study, teller)
    return conduct.trials(folder, study, spec, teller)


def collected(folder: Folder, study: Study) -> Result:
    """Return what the files of all trials tell."""
    found = {
        size: [conduct.trial(folder, study, repeat, size) for repeat in range(study.repeats)]
        for size in study.sizes
    }
    return result(study, found, conduct.wires(folder, study))


def _written(folder: Folder, study: Study, spec: Recipe, drawn: bool) -> tuple[Result, list[Path]]:
    """Write what all trials tell so far; return it, and the files."""
    found = collected(folder, study)
    told = list(changes.told(spec, study.mode, study.batch, study.timing, study.threads))
    return found, output.write(folder.path, found, told, drawn)


def _show(found: Result, files: Sequence[Path]) -> None:
    """Print the table, the fits and where files are, on stdout."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(show.table(found))
    for name, text in show.facts(found).items():
        click.echo(f"{name}: {text}")
    click.echo(f"written: {', '.join(map(str, files))}")
