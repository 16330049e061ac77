"""`hpctrain bench step`: from options to a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import threadpoolctl

from hpctrain import config
from hpctrain.bench import output, rivals
from hpctrain.bench.collectives import must_draw, rounds_of, split_words
from hpctrain.bench.training_step import timing
from hpctrain.core.errors import UsageError
from hpctrain.training import recipe, runs
from hpctrain.training.recipe import Recipe
from hpctrain.tuning.select import NAMES
from hpctrain.world import World

TIMED = (
    "contenders take turns, `calls` steps each; the slowest rank's time / calls counts; exposed_s: "
    "the median of a step minus the same library's own step without communication, taken in the "
    f"same round; correct: after {timing.EQUAL_AFTER} steps from equal weights on equal samples "
    f"the loss lies within {timing.EQUAL_WITHIN:g} of the first row's; one BLAS thread per rank"
)


@dataclass(frozen=True)
class Options:
    """Options of the command line, validated."""

    plan: timing.StepPlan
    rivals: tuple[str, ...]
    json: Path | None
    plot: Path | None


def check(
    name: str,
    sets: Sequence[str],
    algorithms: str,
    rivals_text: str,
    batches: str | None,
    iterations: int,
    warm_up: int,
    json: Path | None,
    plot: Path | None,
) -> Options:
    """Return the validated options; raise UsageError with the expected and the nearest value."""
    spec = recipe.load(name, sets)
    names = list(split_words(algorithms))
    for algorithm in names:
        config.pick(dict.fromkeys((*NAMES, timing.SHARED)), algorithm, "algorithm")
    if not set(names) - {timing.NULL}:
        raise UsageError("--algorithms: expected one that communicates, seen none")
    must_draw(plot)
    plan = timing.StepPlan(
        spec,
        [algorithm for algorithm in names if algorithm != timing.NULL],  # which is always measured
        _batches(spec, batches),
        rounds_of("--iterations", iterations, 1),
        rounds_of("--warm-up", warm_up, 0),
    )
    return Options(plan, tuple(rivals.names(rivals_text)), json, plot)


def run(world: World, options: Options) -> list[timing.Row]:
    """Measure, show and save the rows, and return them. Collective."""
    plan = options.plan
    output.must_be_writable(world, options.json, options.plot)
    split = world.on_all_ranks(lambda: plan.spec.data.load(plan.spec.run.seed))
    model = world.on_all_ranks(lambda: runs.build_model(plan.spec, split))
    joined, skipped = rivals.join(world, options.rivals)
    if reason := timing.refusal(plan.spec):
        skipped |= dict.fromkeys(joined, reason)
    able = {name: library for name, library in joined.items() if name not in skipped}
    about = rivals.about(able, skipped)
    output.print_lines(world, [f"# {name}: {text}" for name, text in about.items()])
    title = f"a step of {plan.spec.run.name}, {world.size} ranks"
    printer = output.RowPrinter(world, title, _columns(able), len(plan.batches))
    try:
        with threadpoolctl.threadpool_limits(1, "blas"):
            rows = printer.print_groups(timing.run(world, plan, model, split.train, able))
    finally:
        for library in joined.values():
            library.close()
    report = output.report(world, rows, timed=TIMED, rivals=about, recipe=plan.spec.tables)
    output.write(world, options.json, report)
    if options.plot is not None and world.rank == 0:
        import_module("hpctrain.bench.plot").bars(rows, title, options.plot)
    return rows


def _columns(able: Iterable[str]) -> list[output.Column]:
    ratio_columns = [(f"x {name}", _ratio_to(name)) for name in able]
    return [
        ("batch", output.number("batch_per_rank", "d")),
        output.ALGORITHM,
        *output.TIMES[:3],
        ("samples/s", output.number("samples_per_s", ",.0f")),
        ("exposed us", output.microseconds("exposed_s")),
        ("loss", output.number("loss", ".5f")),
        *ratio_columns,
        output.CORRECT,
    ]


def _ratio_to(name: str) -> output.Text:
    return lambda row: f"{row['times'][name]:.2f}" if name in row["times"] else "-"


def _batches(spec: Recipe, text: str | None) -> list[int]:
    if text is None:
        if spec.batch.batch_per_rank is None:
            raise UsageError(
                "the recipe gives a batch for all ranks together; say --batch-per-rank N"
            )
        return [spec.batch.batch_per_rank]
    words = list(split_words(text))
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise UsageError(f"--batch-per-rank: expected numbers such as 32,128, seen '{text}'")
    return [int(word) for word in words]
