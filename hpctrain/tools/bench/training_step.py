"""`hpctrain bench step`: from options to a table, JSON and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import threadpoolctl

from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import base, rivals, step_times
from hpctrain.tools.bench.base import split_words
from hpctrain.training import recipe, runs
from hpctrain.training.recipe import Recipe
from hpctrain.tuning.select import ALGORITHM_NAMES
from hpctrain.world import World

TIMING_METHOD = (
    "contenders take turns, `calls` steps each; the slowest rank's time / calls counts; exposed_s: "
    "the median of a step minus the same library's own step without communication, taken in the "
    f"same round; correct: after {step_times.EQUAL_LOSS_STEPS} steps from equal weights on equal "
    f"samples the loss lies within {step_times.LOSS_TOLERANCE:g} of the first row's; one BLAS "
    "thread per rank"
)
TORCH_RIVALS = "gloo,ddp,sync"  #: beside our engines with a module of PyTorch, by default


def parse_options(
    name: str,
    sets: Sequence[str],
    algorithms: str,
    rivals_text: str,
    batches: str | None,
    model: str,
    **bench: Any,
) -> step_times.StepPlan:
    """Return the validated options; a UsageError names the expected and the nearest value."""
    spec = recipe.load(name, sets)
    names = list(split_words(algorithms))
    for algorithm in names:
        config.pick(
            dict.fromkeys((*ALGORITHM_NAMES, step_times.SHARE_PARAMETERS)), algorithm, "algorithm"
        )
    if not set(names) - {step_times.NULL_ALGORITHM}:
        raise UsageError("--algorithms: expected one that communicates, seen none")
    in_torch = config.pick({"ours": False, "torch": True}, model, "--model")
    if in_torch and (reason := step_times.rival_refusal(spec)):
        raise UsageError(f"--model torch: {reason}")
    return step_times.StepPlan(
        spec,
        # `null` is measured in any case.
        [algorithm for algorithm in names if algorithm != step_times.NULL_ALGORITHM],
        _parse_batches(spec, batches),
        in_torch,
        rivals=rivals.parse_names(rivals_text or TORCH_RIVALS * in_torch),
        **bench,
    )


def run(world: World, plan: step_times.StepPlan) -> list[step_times.Row]:
    """Measure, print, save and return the rows; collective."""
    base.check_writable(world, plan.json, plan.plot)
    split = world.on_all_ranks(lambda: plan.spec.data.load(plan.spec.run.seed))
    model = world.on_all_ranks(lambda: runs.build_model(plan.spec, split))
    refusal = step_times.rival_refusal(plan.spec)
    title = f"a step of {plan.spec.run.name}, {world.size} ranks"
    with rivals.joined(world, plan.rivals, lambda _: refusal) as (
        joined_rivals,
        rival_descriptions,
    ):
        groups = step_times.run(world, plan, model, split.train, joined_rivals)
        with threadpoolctl.threadpool_limits(1, "blas"):
            rows = base.print_groups(
                world, title, _columns(joined_rivals), groups, len(plan.batches)
            )
    facts = {"timed": TIMING_METHOD, "rivals": rival_descriptions, "recipe": plan.spec.tables}
    base.save(world, plan, rows, title, lambda plot: plot.draw_step_bars, facts)
    return rows


def _columns(supported_rivals: Iterable[str]) -> list[base.Column]:
    rival_columns = [(f"x {name}", _ratio_formatter(name)) for name in supported_rivals]
    return [
        ("batch", base.number_column("batch_per_rank", "d")),
        base.ALGORITHM_COLUMN,
        *base.TIME_COLUMNS[:3],
        ("samples/s", base.number_column("samples_per_s", ",.0f")),
        ("exposed us", base.microseconds_column("exposed_s")),
        ("loss", base.number_column("loss", ".5f")),
        *rival_columns,
        base.CORRECT_COLUMN,
    ]


def _ratio_formatter(name: str) -> base.RowFormatter:
    return lambda row: f"{row['times'][name]:.2f}" if name in row["times"] else "-"


def _parse_batches(spec: Recipe, text: str | None) -> list[int]:
    if text is None:
        if spec.batch.batch_per_rank is None:
            raise UsageError(
                "the recipe gives a batch for all ranks together; use --batch-per-rank N"
            )
        return [spec.batch.batch_per_rank]
    batch_words = list(split_words(text))
    if not batch_words or not all(word.isdigit() and int(word) for word in batch_words):
        raise UsageError(f"--batch-per-rank: expected numbers such as 32,128, seen '{text}'")
    return [int(word) for word in batch_words]
