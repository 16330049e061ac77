"""Simulated trials of scaling studies: the files of `hpctrain train`, with known times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpctrain.core.run_files import run_folder
from hpctrain.tools.scaling import collect
from hpctrain.tools.scaling.study import Study
from hpctrain.tools.scaling.subject import RecipeSubject
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tools.scaling.trials import local_runner
from hpctrain.training import recipe

COLD = 3.0  #: warm-up takes so many times as long, and must not count
SPEC = recipe.load("digits")
SUBJECT = RecipeSubject(SPEC)


@dataclass(frozen=True)
class Times:
    """Seconds of a step on a size."""

    step_s: float
    compute_s: float
    wire_s: float = 0.0
    wait_s: float = 0.0
    algorithm: str = "auto (ring)"


def study(sizes=(1, 2, 4), mode="strong", **changes):
    """Return a study of digits with 100 timed steps."""
    created = Study(
        name="digits", mode=mode, on="local", link=None, sizes=tuple(Size(n) for n in sizes),
        repeats=3, tables=SPEC.tables, batch=128, gradient_bytes=340_008,
        machine={"cpu": "made up", "cores": 8}, threads=1, cores=8, steps=100,
    )  # fmt: skip
    return replace(created, **changes)


def write(folder, timing, times, samples, ranks, status="done"):
    """Write the files of a trial whose steps take `times`, of `samples` each."""
    folder.mkdir(parents=True)
    clock = dict.fromkeys(("step_s", *collect.TIME_COLUMNS), 0.0)
    for step in [*range(timing.interval, timing.last + 1, timing.interval), timing.total]:
        steps = 1 if step == timing.total else timing.interval
        slow = COLD if step <= timing.first or step == timing.total else 1.0
        for name in clock:
            clock[name] += steps * slow * getattr(times, name)
        reported = {name: [clock[name]] * ranks for name in collect.TIME_COLUMNS}
        row = {"step": step, "steps": steps, "since_step": 0, "wall_s": clock["step_s"],
               "samples_per_s": samples / times.step_s / slow, "ranks": reported}  # fmt: skip
        run_folder.append_row(folder, row)
    summary = {"status": status, "exit_code": 0, "algorithm": times.algorithm, "hosts": ["a"],
               "threads": 1, "gpus": []}  # fmt: skip
    run_folder.write_summary(folder, summary)


def runner(times, calls, failing=()):
    """Return what stands for `places.run`: it notes trials and writes their files at once.

    `times` tells the Times of a number of ranks and a repeat; sizes in `failing` say why they fail.
    """

    def run(command, log, threads, limit_s=0.0, on_poll=None, variables=None):
        words = [str(word) for word in command]
        ranks = int(words[words.index("-n") + 1])
        if "train" not in words:
            calls.append(("link", ranks))
            return 1
        out = local_runner.Path(words[words.index("--out") + 1])
        repeat = int(out.name.partition("-")[2]) if out.name.startswith("repeat") else None
        calls.append(("pilot" if repeat is None else repeat, ranks))
        if ranks in failing:
            log.write_text("starting\nhpctrain: no such thing on this size\nbye\n")
            return 2
        log.write_text("")
        spec = recipe.load(words[words.index("train") + 1])
        timing = collect.Timing(spec.run.interval_steps)
        samples = spec.batch.size(ranks)
        write(out, timing, times(ranks, repeat or 0), samples, ranks)
        return 0

    return run
