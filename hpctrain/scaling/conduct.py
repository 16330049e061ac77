"""Runs what is missing of a study here: pilots, links, then trials, repeats taken in turn.

    repeat 0: 1 2 4 ranks    repeat 1: 1 2 4 ranks    ...

Machines drift, by their temperature and by their other users; so sizes alternate, and efficiency
compares neighbours in time. A trial counts as done when its files tell so, and only then. A size
whose first trial fails is not tried again in the same call.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpctrain.bench import measured
from hpctrain.errors import UsageError
from hpctrain.recipe import Recipe
from hpctrain.scaling import changes, collect, places
from hpctrain.scaling.changes import Timing
from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.study import Folder, Study
from hpctrain.scaling.teller import Teller
from hpctrain.tuning.loggp import Wire

PILOT_STEPS = 10
TRIAL_S, FEWEST, MOST = 2.0, 20, 3000  #: seconds that are timed per trial; bounds in steps
MESSAGES = "4B,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB"


def piloted(folder: Folder, study: Study, spec: Recipe, teller: Teller) -> Study:
    """Return the study with its steps: as many as take the slower end of sizes about TRIAL_S."""
    timing, seen = Timing.of(PILOT_STEPS), []
    for size in sorted({min(study.sizes), max(study.sizes)}):
        teller.begin(f"pilot on {size.said}")
        found = _train(folder, study, spec, size, folder.pilot(size), timing)
        if isinstance(found, Trial):
            seen.append(found.step_s)
    asked = TRIAL_S / max(seen) if seen else FEWEST
    steps = round(min(max(asked, FEWEST), MOST) / 10) * 10
    return replace(study, steps=steps)


def links(folder: Folder, study: Study, teller: Teller) -> None:
    """Measure single messages in a node, and between nodes: each on the smallest size that can."""
    for size in linked(study):
        at = folder.link(size)
        if not (at / "link.json").exists():
            teller.begin(f"messages on {size.said}")
            at.mkdir(parents=True, exist_ok=True)
            aside = at / "aside.json"
            arguments = ["bench", "p2p", "--sizes", MESSAGES, "--iterations", "10"]
            command = places.line(study, size, [*arguments, "--json", str(aside.absolute())])
            if places.run(command, at / "link.log", study.threads) == 0:
                aside.rename(at / "link.json")


def linked(study: Study) -> list[Size]:
    """Return the sizes on which messages are measured."""
    several = [size for size in study.sizes if size.ranks > 1]
    within = [size for size in several if size.nodes == 1][:1]
    return within + [size for size in several if size.nodes > 1][:1]


def wires(folder: Folder, study: Study) -> tuple[Wire | None, Wire | None]:
    """Return the wires in a node and between nodes, None where they were not measured."""
    found: dict[bool, Wire | None] = {}
    for size in linked(study):
        try:
            told = measured.read(folder.link(size) / "link.json")
        except UsageError:  # not there, or damaged: the model does without
            continue
        found[size.nodes > 1] = told.between or told.inside
    return found.get(False), found.get(True)


def missing(folder: Folder, study: Study) -> list[tuple[int, Size]]:
    """Return (repeat, size) of each trial that is not done, in the order of the trials."""
    every = [(repeat, size) for repeat in range(study.repeats) for size in study.sizes]
    return [one for one in every if isinstance(trial(folder, study, *one), Gap)]


def trial(folder: Folder, study: Study, repeat: int, size: Size) -> Trial | Gap:
    """Return what a trial tells."""
    return collect.trial(folder.trial(size, repeat), study.timing)


def trials(folder: Folder, study: Study, spec: Recipe, teller: Teller) -> Iterator[Trial | Gap]:
    """Run what is missing; yield what became of each."""
    failed: set[Size] = set()
    for repeat, size in missing(folder, study):
        what = f"{size.said}, repeat {repeat + 1} of {study.repeats}"
        if size in failed:
            teller.end(what, Gap("not tried: an earlier repeat failed"))
            continue
        teller.begin(what)
        found = _train(folder, study, spec, size, folder.trial(size, repeat), study.timing)
        if isinstance(found, Gap):
            failed.add(size)
        teller.end(what, found)
        yield found


def _train(
    folder: Folder, study: Study, spec: Recipe, size: Size, out: Path, timing: Timing
) -> Trial | Gap:
    """Run one trial into `out`, which is emptied first; its checkpoint is not kept."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    timed = changes.trial(spec, study.mode, study.batch, size, timing)
    file = folder.recipe(size, timed.toml()).absolute()
    arguments = ["train", str(file), "--out", str(out.absolute())]
    places.run(places.line(study, size, arguments), collect.log_of(out), study.threads)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    return collect.trial(out, timing)
