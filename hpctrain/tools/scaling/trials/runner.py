"""Run the missing trials of a study on this machine: pilots, links, then trials by repeat.

    repeat 0: 1 2 4 ranks    repeat 1: 1 2 4 ranks    ...

Machines drift, by their temperature and by their other users; so sizes alternate, and efficiency
compares neighbours in time. A trial is done when its files show that, and only then. A size
whose first trial fails is not tried again in the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpctrain.cluster.slurm import submit
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench.prediction import measurements
from hpctrain.tools.scaling import collect
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.output.live_table import RUNNING, LiveView, TrialStatus
from hpctrain.tools.scaling.study import Study, StudyFolder, TrialKey
from hpctrain.tools.scaling.subject import Subject
from hpctrain.tools.scaling.trial_recipe import Size, Timing
from hpctrain.tools.scaling.trials import local_runner
from hpctrain.tuning.model.loggp import Wire

PILOT_STEPS = 10
TRIAL_S, MIN_STEPS, MAX_STEPS = 2.0, 20, 3000  #: seconds that are timed per trial; bounds in steps
MESSAGES = "4B,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB"


def run_pilots(folder: StudyFolder, study: Study, subject: Subject, view: LiveView) -> Study:
    """Return the study with its steps: about TRIAL_S on the slower of its two extreme sizes.

    The pilots of a script also show its batch, and the bytes of its gradients.
    """
    timing, step_times = Timing.of(PILOT_STEPS), []
    pilots = {size: folder.pilot(size) for size in sorted({min(study.sizes), max(study.sizes)})}
    for size, out in pilots.items():
        view.show_activity(f"pilot on {size.text}")
        outcome = _train_trial(folder, study, subject, size, out, timing)
        if isinstance(outcome, TrialResult):
            step_times.append(outcome.step_s)
    step_count = TRIAL_S / max(step_times) if step_times else MIN_STEPS
    steps = round(min(max(step_count, MIN_STEPS), MAX_STEPS) / 10) * 10
    return replace(study, steps=study.steps or steps, **subject.pilot_facts(study, pilots))


def measure_links(folder: StudyFolder, study: Study, view: LiveView) -> None:
    """Measure single messages in a node, and between nodes: each on the smallest size that can."""
    for size in link_sizes(study):
        link_folder = folder.link(size)
        if not (link_folder / "link.json").exists():
            view.show_activity(f"messages on {size.text}")
            temporary = link_folder / "aside.json"
            folder.make_folders_of(temporary)
            arguments = ["bench", "p2p", "--sizes", MESSAGES, "--iterations", "10"]
            command = local_runner.line(
                study, size, [*arguments, "--json", str(temporary.absolute())]
            )
            if local_runner.run(command, link_folder / "link.log", study.threads) == 0:
                temporary.rename(link_folder / "link.json")
            else:
                text = f"messages on {size.text} were not measured, see {link_folder / 'link.log'}"
                view.log_line(logging.WARNING, f"{text}: predictions do without")


def link_sizes(study: Study) -> list[Size]:
    """Return the sizes on which messages are measured."""
    sizes_of_several_ranks = [size for size in study.sizes if size.ranks > 1]
    one_node_size = [size for size in sizes_of_several_ranks if size.nodes == 1][:1]
    return one_node_size + [size for size in sizes_of_several_ranks if size.nodes > 1][:1]


def wires(folder: StudyFolder, study: Study) -> tuple[Wire | None, Wire | None]:
    """Return the wires in a node and between nodes, None where they were not measured."""
    wire_of: dict[bool, Wire | None] = {}
    for size in link_sizes(study):
        try:
            cluster = measurements.read_measurements(folder.link(size) / "link.json")
        except UsageError:  # not there, or damaged: the model does without
            continue
        wire_of[size.nodes > 1] = cluster.between or cluster.inside
    return wire_of.get(False), wire_of.get(True)


def statuses(folder: StudyFolder, study: Study) -> dict[TrialKey, TrialStatus]:
    """Return the status of each trial by its files: one that is not measured waits."""
    return {key: _status(folder.trial(key[1], key[0]), study) for key in study.trials}


def _status(out: Path, study: Study) -> TrialStatus:
    outcome, jobs = (
        collect.read_trial(out, study.timing),
        submit.read_job_ids(collect.job_folder(out)),
    )
    return (
        TrialStatus.from_outcome(outcome, *jobs[-1:])
        if isinstance(outcome, TrialResult)
        else TrialStatus()
    )


def current_statuses(folder: StudyFolder, study: Study) -> dict[TrialKey, TrialStatus]:
    """Return the status of each trial by its files, for a process that only looks.

    Of the trials begun and not done the latest is running, since they run one after another.
    """
    result = statuses(folder, study)
    logs = {
        key: collect.log_path(folder.trial(key[1], key[0])) for key in missing_trials(folder, study)
    }
    start_times = {key: log.stat().st_mtime_ns for key, log in logs.items() if log.exists()}
    for key in start_times:
        out = folder.trial(key[1], key[0])
        is_running = key == max(start_times, key=lambda k: start_times[k])
        result[key] = (
            TrialStatus(RUNNING, step=collect.read_last_step(out))
            if is_running
            else TrialStatus.from_outcome(trial(folder, study, *key))
        )
    return result


def missing_trials(folder: StudyFolder, study: Study) -> list[TrialKey]:
    """Return each trial that is not done, in the order of the trials."""
    return [key for key, status in statuses(folder, study).items() if status.trial is None]


def trial(folder: StudyFolder, study: Study, repeat: int, size: Size) -> TrialResult | Gap:
    """Return the outcome of a trial."""
    return collect.read_trial(folder.trial(size, repeat), study.timing)


def trials(
    folder: StudyFolder, study: Study, subject: Subject, view: LiveView
) -> Iterator[TrialResult | Gap]:
    """Run the missing trials; yield the outcome of each."""
    failed_sizes: set[Size] = set()
    for key in missing_trials(folder, study):
        repeat, size = key
        if size in failed_sizes:
            view.update({key: TrialStatus.from_outcome(Gap("not tried: an earlier repeat failed"))})
            continue
        out = folder.trial(size, repeat)
        view.update({key: TrialStatus(RUNNING)})
        on_poll = partial(_show_progress, view, key, out) if view.is_drawn else None
        outcome = _train_trial(folder, study, subject, size, out, study.timing, on_poll)
        if isinstance(outcome, Gap):
            failed_sizes.add(size)
        view.update({key: TrialStatus.from_outcome(outcome)})
        yield outcome


def _show_progress(view: LiveView, key: TrialKey, out: Path) -> None:
    """Show the current step of a trial."""
    view.update({key: TrialStatus(RUNNING, step=collect.read_last_step(out))})


def _train_trial(
    folder: StudyFolder,
    study: Study,
    subject: Subject,
    size: Size,
    out: Path,
    timing: Timing,
    on_poll: Callable[[], None] | None = None,
) -> TrialResult | Gap:
    """Run one trial into `out`, which is emptied first; its checkpoint is not kept."""
    folder.make_room(out)
    arguments, variables = subject.command(folder, study, size, out, timing)
    line = local_runner.line(study, size, arguments)
    log_path = collect.log_path(out)
    local_runner.run(line, log_path, study.threads, on_poll=on_poll, variables=variables)
    collect.remove_checkpoints(out)
    return collect.read_trial(out, timing)
