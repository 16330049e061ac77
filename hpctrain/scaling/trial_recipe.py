"""From a recipe to the recipe of a trial: the same steps, and nothing else.

    warm-up          timed                                      tail
    | row | row | row | row | row | row | row | row | row | ... | 1 step, evaluation, checkpoint |

A row of metrics is made every `interval` steps. The first two do not count, since caches, buffers
and branch predictors are cold there; the last step does not, since the model is evaluated and saved
behind it. All else that interrupts steps is left out, and each change is reported to the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

from hpctrain import engines
from hpctrain.config import overrides
from hpctrain.core.errors import UsageError
from hpctrain.scaling.world_sizes import Size
from hpctrain.training import recipe
from hpctrain.training.recipe import Recipe

INTERVALS, WARM_UP = 10, 2  #: rows of metrics that count, and before them
#: The order of an epoch's samples is drawn at once; more would cost memory and seconds.
MOST_SAMPLES = 1 << 24
MODES = ("strong", "weak")


@dataclass(frozen=True)
class Timing:
    """The length of a trial, in rows of `interval` steps each."""

    interval: int

    @staticmethod
    def of(steps: int) -> Timing:
        """Return the timing with `steps` timed steps or a few more."""
        return Timing(-(-steps // INTERVALS))

    @property
    def first(self) -> int:
        """The step at which the timed part begins."""
        return WARM_UP * self.interval

    @property
    def last(self) -> int:
        """The step at which it ends."""
        return (WARM_UP + INTERVALS) * self.interval

    @property
    def total(self) -> int:
        """All steps."""
        return self.last + 1


def base_batch(spec: Recipe, mode: str, sizes: list[Size]) -> int:
    """Return the samples of a step: of all ranks in strong scaling, of each in weak scaling.

    Where the recipe gives the other number: in strong scaling each worker of the largest size has
    the recipe's batch per rank; in weak scaling each has the recipe's batch of all ranks.
    """
    batch = spec.batch.batch or spec.batch.batch_per_rank or 0
    if mode == "strong" and spec.batch.batch is None:
        return batch * workers(spec, max(sizes))
    return batch


def workers(spec: Recipe, size: Size) -> int:
    """Return the number of workers of `size`; raise UsageError for impossible sizes."""
    with _name_size(size):
        return engines.workers_of(spec.engine, size.ranks)


def must_divide(spec: Recipe, mode: str, batch: int, sizes: list[Size]) -> None:
    """Raise UsageError where ranks would have uneven shares of a batch, or cannot train at all.

    The largest share counts.
    """
    for size in sizes:
        n = workers(spec, size)
        if mode == "strong" and batch % n:
            raise UsageError(
                f"{size.text}: a batch of {batch} is not divisible by {n} workers, and uneven "
                "shares would be timed as bad scaling; use --set "
                f"{_even_batch(spec, batch, sizes)}, other sizes, or --mode weak"
            )
        with _name_size(size):
            engines.must_fit(spec.engine, size.ranks, batch if mode == "strong" else batch * n)


def _even_batch(spec: Recipe, batch: int, sizes: list[Size]) -> str:
    """Return the setting whose batch all sizes divide, the next below `batch` if there is one."""
    common_multiple = math.lcm(*(workers(spec, size) for size in sizes))
    nearest_batch = batch // common_multiple * common_multiple or common_multiple
    if spec.batch.batch is not None:
        return f"optimizer.batch={nearest_batch}"
    return f"optimizer.batch_per_rank={nearest_batch // workers(spec, max(sizes))}"


@contextmanager
def _name_size(size: Size) -> Iterator[None]:
    """Name the size in a UsageError raised inside."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{size.text}: {error}") from None


def trial(spec: Recipe, mode: str, batch: int, size: Size, timing: Timing) -> Recipe:
    """Return the recipe of a trial of `size`."""
    tables = deepcopy(spec.tables)
    for name in ("early_stop", "trace"):
        tables.pop(name, None)
    tables["checkpoint"] = {"keep": 1}
    run = tables["run"]
    for key in ("epochs", "evaluate_epochs", "callbacks"):
        run.pop(key, None)
    of_step = batch if mode == "strong" else batch * workers(spec, size)
    run |= {
        "steps": timing.total,
        "interval_steps": timing.interval,
        "evaluate_steps": timing.total,
        "epoch_samples": of_step * min(timing.total, max(1, MOST_SAMPLES // of_step)),
    }
    optimizer = tables["optimizer"]
    for key in overrides.BATCH_KEYS:
        optimizer.pop(key, None)
    if mode == "strong":
        optimizer.pop("base_batch", None)
    optimizer["batch" if mode == "strong" else "batch_per_rank"] = batch
    return recipe.check(tables)


def deviations(
    spec: Recipe, mode: str, batch: int, timing: Timing, threads: int | None
) -> Iterator[str]:
    """Yield the differences between a trial and the recipe, a sentence each."""
    length = f"{spec.run.epochs} epochs" if spec.run.epochs else f"{spec.run.steps} steps"
    yield (
        f"{timing.total} steps in place of {length}: {timing.first} to warm up, "
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
    if omissions := list(_omissions(spec)):
        yield f"left out: {', '.join(omissions)}"
    if threads is not None:
        yield f"OMP_NUM_THREADS={threads} at every size, so that a rank is the same everywhere"


def _omissions(spec: Recipe) -> Iterator[str]:
    if spec.run.callbacks:
        yield "callbacks"
    if spec.early_stop:
        yield "early stop"
    if spec.trace.enabled:
        yield "trace"
    if spec.checkpoint.keep_best:
        yield "keep_best"
