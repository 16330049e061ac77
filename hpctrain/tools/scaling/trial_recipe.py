"""The sizes of a study, numbers of ranks and nodes, and the recipe of a trial of each.

A trial has the same training steps as the recipe, without interruptions:

    warm-up          timed                                      tail
    | row | row | row | row | row | row | row | row | row | ... | 1 step, evaluation, checkpoint |

A row of metrics covers `interval` steps. The first two rows are warm-up: caches, buffers and branch
predictors are cold. The last step is not timed: evaluation and checkpoint follow it. Everything
else that interrupts steps is removed, and each change of the recipe is reported to the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated

import pydantic

from hpctrain import engines
from hpctrain.core.config import overrides
from hpctrain.core.errors import UsageError
from hpctrain.tools.bench import units
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe

TIMED_INTERVALS, WARM_UP_INTERVALS = 10, 2  #: timed rows of metrics, and warm-up rows before them
#: The sampler draws the order of a whole epoch at once: more samples cost memory and seconds.
MAX_EPOCH_SAMPLES = 1 << 24
SCALING_MODES = ("strong", "weak")
PositiveInt = Annotated[int, pydantic.Field(ge=1, le=1 << 60)]


@dataclass(frozen=True)
class Timing:
    """The length of a trial, in rows of `interval` steps each."""

    interval: int

    @staticmethod
    def of(steps: int) -> Timing:
        """Return the timing with at least `steps` timed steps."""
        return Timing(-(-steps // TIMED_INTERVALS))

    @property
    def first(self) -> int:
        """The step at which the timed part begins."""
        return WARM_UP_INTERVALS * self.interval

    @property
    def last(self) -> int:
        """The step at which the timed part ends."""
        return (WARM_UP_INTERVALS + TIMED_INTERVALS) * self.interval

    @property
    def total(self) -> int:
        """The number of steps, untimed ones included."""
        return self.last + 1


def choose_batch(spec: Recipe, mode: str, sizes: list[Size]) -> int:
    """Return the batch: global in strong scaling, per rank in weak scaling.

    If the recipe only has the other number: in strong scaling each worker of the largest size gets
    the recipe's batch per rank; in weak scaling each worker gets the recipe's global batch.
    """
    batch = spec.batch.batch or spec.batch.batch_per_rank or 0
    if mode == "strong" and spec.batch.batch is None:
        return batch * count_workers(spec, max(sizes))
    return batch


def count_workers(spec: Recipe, size: Size) -> int:
    """Return the number of workers of `size`; raise UsageError if the engine rejects the size."""
    with _prefix_errors(size):
        return spec.workers(size.ranks)


def check_divisible(spec: Recipe, mode: str, batch: int, sizes: list[Size]) -> None:
    """Raise UsageError for uneven shares of a batch or a size that cannot train.

    Uneven shares would distort the results: each step takes as long as the largest share.
    """
    for size in sizes:
        worker_count = count_workers(spec, size)
        if mode == "strong" and batch % worker_count:
            raise UsageError(
                f"{size.text}: a batch of {batch} is not divisible by {worker_count} workers, and "
                "uneven shares would be timed as bad scaling; use --set "
                f"{_suggest_batch(spec, batch, sizes)}, other sizes, or --mode weak"
            )
        with _prefix_errors(size):
            engines.must_fit(
                spec.engine,
                spec.mesh.workers(size.ranks),
                batch if mode == "strong" else batch * worker_count,
            )


def _suggest_batch(spec: Recipe, batch: int, sizes: list[Size]) -> str:
    """Return a setting with a batch that all sizes divide, if possible just below `batch`."""
    common_multiple = math.lcm(*(count_workers(spec, size) for size in sizes))
    nearest_batch = batch // common_multiple * common_multiple or common_multiple
    if spec.batch.batch is not None:
        return f"optimizer.batch={nearest_batch}"
    return f"optimizer.batch_per_rank={nearest_batch // count_workers(spec, max(sizes))}"


@contextmanager
def _prefix_errors(size: Size) -> Iterator[None]:
    """Prefix a UsageError raised inside with the size."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{size.text}: {error}") from None


def make_trial_recipe(spec: Recipe, mode: str, batch: int, size: Size, timing: Timing) -> Recipe:
    """Return the recipe of a trial of `size`."""
    tables = deepcopy(spec.tables)
    for name in ("early_stop", "trace", "log"):
        tables.pop(name, None)
    tables["checkpoint"] = {"keep": 1}
    run = tables["run"]
    for key in ("epochs", "evaluate_epochs", "callbacks"):
        run.pop(key, None)
    samples_per_step = batch if mode == "strong" else batch * count_workers(spec, size)
    run |= {
        "steps": timing.total,
        "interval_steps": timing.interval,
        "evaluate_steps": timing.total,
        "epoch_samples": samples_per_step
        * min(timing.total, max(1, MAX_EPOCH_SAMPLES // samples_per_step)),
    }
    optimizer = tables["optimizer"]
    for key in overrides.BATCH_KEYS:
        optimizer.pop(key, None)
    if mode == "strong":
        optimizer.pop("base_batch", None)
    optimizer["batch" if mode == "strong" else "batch_per_rank"] = batch
    return recipe.check(tables)


def describe_deviations(
    spec: Recipe, mode: str, batch: int, timing: Timing, threads: int | None
) -> Iterator[str]:
    """Yield one sentence for each difference between a trial and the recipe."""
    recipe_length = f"{spec.run.epochs} epochs" if spec.run.epochs else f"{spec.run.steps} steps"
    yield (
        f"{timing.total} steps in place of {recipe_length}: {timing.first} to warm up, "
        f"{timing.last - timing.first} timed, 1 behind them"
    )
    yield "evaluation and a checkpoint only behind the last timed step"
    yield "the training set is repeated, so that all batches are full and no epoch ends on the way"
    key = "batch" if mode == "strong" else "batch_per_rank"
    if getattr(spec.batch, key) != batch:
        batch_text = f"batch = {spec.batch.batch}"
        if spec.batch.batch is None:
            batch_text = f"batch_per_rank = {spec.batch.batch_per_rank}"
        yield f"{mode} scaling: {key} = {batch} in place of {batch_text}"
    features = {
        "callbacks": spec.run.callbacks,
        "early stop": spec.early_stop,
        "trace": spec.trace.enabled,
        "loggers": spec.log.names,
        "keep_best": spec.checkpoint.keep_best,
    }
    if omitted := [name for name, value in features.items() if value]:
        yield f"left out: {', '.join(omitted)}"
    if threads is not None:
        yield f"OMP_NUM_THREADS={threads} at every size, so that a rank is the same everywhere"


@dataclass(frozen=True, order=True)
class Size:
    """`ranks` ranks in total, evenly distributed over `nodes` nodes."""

    ranks: PositiveInt
    nodes: PositiveInt = 1

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.ranks // self.nodes

    @property
    def name(self) -> str:
        """The name of the size's folder."""
        return f"{self.ranks:05d}-ranks-{self.nodes:05d}-nodes"

    @property
    def text(self) -> str:
        """The size in words."""
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{nodes}"

    def scaled(self, factor: int) -> Size:
        """Return a size with `factor` times as many ranks, on as many times the nodes if several.

        A size on one node stays on that node.
        """
        return Size(self.ranks * factor, self.nodes * factor if self.nodes > 1 else 1)


def parse_sizes(
    ranks: str | None, nodes: str | None, per_node: int | None, platform: str
) -> list[Size]:
    """Return the sizes that `--ranks`, `--nodes` and `--ranks-per-node` ask for, ascending.

    Only `--nodes`: each node has `per_node` (default 1) ranks. Only `--ranks`: one node locally,
    elsewhere as few nodes as possible with `per_node` (default 1) ranks each. Both: pairs, or one
    number of nodes for all sizes. Raises UsageError if the nodes do not divide the ranks.
    """
    if per_node is not None and per_node < 1:
        raise UsageError(f"--ranks-per-node: expected 1 or more, seen {per_node}")
    if not ranks and not nodes:
        raise UsageError("scale needs sizes: --ranks 1,2,4 or --nodes 1,2,4")
    if platform == "local" and nodes:
        raise UsageError(
            "--nodes: this machine is one node; use --ranks, or --on netlab or --on slurm"
        )
    node_counts = units.parse_counts(nodes, "--nodes") if nodes else []
    if not ranks:
        return [Size(count * (per_node or 1), count) for count in node_counts]
    rank_counts = units.parse_counts(ranks)
    if platform == "local":
        return [Size(count) for count in rank_counts]
    return _sizes_over_nodes(rank_counts, node_counts, per_node)


def _sizes_over_nodes(
    ranks: Sequence[int], nodes: Sequence[int], per_node: int | None
) -> list[Size]:
    if not nodes:
        return [_make_size(count, -(-count // (per_node or 1))) for count in ranks]
    if per_node is not None:
        raise UsageError("--ranks-per-node follows from --ranks and --nodes: leave it out")
    if len(nodes) not in (1, len(ranks)):
        raise UsageError(
            f"--nodes: expected one number, or one for each of {len(ranks)} --ranks, "
            f"seen {len(nodes)}"
        )
    pairs = zip(ranks, nodes if len(nodes) > 1 else [*nodes] * len(ranks), strict=True)
    return [_make_size(*ranks_and_nodes) for ranks_and_nodes in pairs]


def _make_size(ranks: int, nodes: int) -> Size:
    if ranks % nodes:
        lower_multiple = ranks // nodes * nodes
        valid_counts = (
            f"{lower_multiple} or {lower_multiple + nodes}" if lower_multiple else f"{nodes}"
        )
        raise UsageError(
            f"{ranks} ranks on {nodes} nodes: expected as many ranks on each, seen "
            f"{ranks / nodes:.3g}; take {valid_counts} ranks"
        )
    return Size(ranks, nodes)


def ranks_per_core(size: Size, cores: int | None, threads: int) -> float:
    """Return the number of ranks per core: above 1 if the ranks' `threads` exceed `cores`.

    All nodes of a netlab share the cores of one machine. `cores` is None if nodes have their own.
    """
    return 1.0 if cores is None else max(1.0, size.ranks * threads / cores)
