"""Evaluation of a set by all workers: the loss, and the metrics that Trainer and recipe name.

    block 0 1 2 3    sums of each block    engine.sum    added block by block, on every rank
    counts           whole numbers         engine.sum    exact in any order
    scores for AUC   of a worker's rows    engine.sum    a few columns of the whole set at a time,
                                                         of which each worker computes its part

The number of workers only decides the owner of each block. A sum of columns that are 0 on all
workers but one is a gathering: it is exact, and every engine has it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpctrain import nn
from hpctrain.data import Samples, in_pieces, share
from hpctrain.gradients.blocks import add_in_order
from hpctrain.gradients.replica import Batch, Replica
from hpctrain.nn.metrics import BoundMetrics, Metric, auc, bind
from hpctrain.nn.metrics.scores import Task
from hpctrain.world import World

log = logging.getLogger(__name__)
GATHERED_BYTES = 64 << 20  #: of columns of scores gathered at once; one column at least
ANNOUNCED_BYTES = 256 << 20  #: of scores that a rank keeps in an evaluation
NO_METRICS = BoundMetrics()


class Evaluator(Protocol):
    """The part of an engine that evaluates: a worker's model, and sums over all ranks."""

    @property
    def replica(self) -> Replica:
        """The model to evaluate."""

    @property
    def worker(self) -> int | None:
        """The number of this worker; None for a rank without a share."""

    @property
    def workers(self) -> int:
        """The number of workers."""

    def settle(self) -> None:
        """Put the parameters to evaluate into the arena."""

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of float64 over all ranks, the same on each."""


class SoleEvaluator(NamedTuple):
    """A model that one process evaluates alone."""

    replica: Any
    worker: int | None = 0
    workers: int = 1

    def settle(self) -> None:
        """Do nothing: the parameters lie in the arena."""

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        """Return `numbers`."""
        return numbers


def bind_metrics(
    metrics: Sequence[str | Metric], model: Any, samples: Samples | None
) -> BoundMetrics:
    """Return `metrics` for a model and a set; raise UsageError for one that does not fit them."""
    if not metrics or samples is None:
        return NO_METRICS
    return bind(metrics, model.loss, *model.metric_example(samples))


def bind_on_ranks(
    world: World, metrics: Sequence[str | Metric], model: Any, samples: Samples | None
) -> BoundMetrics:
    """Return `metrics` for a model and a set; collective.

    Raises UsageError on all ranks for one that does not fit, or if ranks have others.
    """
    bound = world.on_all_ranks(lambda: bind_metrics(metrics, model, samples))
    sizes_text = f"{bound.count_size} counts and {bound.sum_size} sums"
    world.must_agree(f"{[*bound.names]} with {sizes_text}", "metrics")
    return bound


class Evaluation:
    """Evaluations of sets with metrics; the reason of an undefined metric is logged once."""

    def __init__(
        self, evaluator: Evaluator, metrics: BoundMetrics, blocks: int = 1, logs: bool = True
    ):
        """`blocks`: parts of a set, see hpctrain.engines.blocks_of; `logs`: one rank does."""
        self._evaluator, self._metrics, self._blocks, self._logs = evaluator, metrics, blocks, logs
        self._logged: set[str] = set()

    @property
    def loss(self) -> nn.Loss:
        """The loss, without the offset of a run's targets."""
        return self._evaluator.replica.loss

    @property
    def scalars(self) -> list[str]:
        """The names of the metrics that are numbers, the loss and its own metrics first."""
        return [*self.loss.metrics, *self._metrics.scalars]

    def as_entries(self, values: dict[str, Any] | None) -> dict[str, Any]:
        """Return the results of an evaluation as entries of a row; None for each without one."""
        names = [*self.loss.metrics, *self._metrics.names]
        return {f"test_{name}": None if values is None else values[name] for name in names}

    def announce(self, samples: Samples | None, metrics: Sequence[str | Metric]) -> None:
        """Log the memory for scores of `samples`, if it is much, and `metrics` without a set."""
        task = self._metrics.task
        if samples is None and metrics and self._logs:
            log.warning("metrics are of a test set, and there is none: give evaluate=(x, y)")
        if samples is None or task is None or not self._metrics.has_auc or not self._logs:
            return
        rows = len(samples) * task.targets // self._evaluator.workers
        truth_bytes = task.classes if task.has_labels else 8
        own_bytes = rows * (8 * _columns(task) + truth_bytes)
        if own_bytes > ANNOUNCED_BYTES:
            log.info("auc: the scores of an evaluation need %s MiB per rank", own_bytes >> 20)

    def evaluate(self, samples: Samples) -> dict[str, Any]:
        """Return the values of loss and metrics over `samples`, the same on all ranks; collective.

        None is the value of a metric that the set does not define.
        """
        evaluator, metrics, loss = self._evaluator, self._metrics, self.loss
        evaluator.settle()
        terms = 2 * len(loss.terms)
        table = np.zeros((self._blocks, terms + metrics.sum_size))
        tally = _Tally(metrics)
        if evaluator.worker is not None:
            _, own_blocks = share(np.arange(self._blocks), evaluator.worker, evaluator.workers)
            for block in own_blocks:
                _, indexes = share(np.arange(len(samples)), block, self._blocks)
                tally.sums = table[block, terms:]
                sums = _sums_over(evaluator.replica, samples, indexes, tally)
                table[block, :terms] = nn.losses.pack(sums, loss.terms)
        numbers = evaluator.sum(np.concatenate([table.ravel(), tally.counts]))
        table, counts = numbers[: table.size].reshape(table.shape), numbers[table.size :]
        own_sums = reduce(np.add, table[:, terms:])
        mean_area = partial(self._mean_area, tally, len(samples))
        values, reasons = metrics.finish(counts, own_sums, mean_area)
        if self._logs:
            for name in reasons.keys() - self._logged:
                log.warning("the metric %s is not defined here: %s", name, reasons[name])
            self._logged |= reasons.keys()
        return {**nn.losses.evaluate(loss, add_in_order(table[:, :terms], loss)), **values}

    def _mean_area(self, tally: _Tally, samples: int) -> float:
        """Return the mean AUC of the columns of scores; collective."""
        evaluator, task = self._evaluator, self._metrics.task
        assert task is not None
        columns = _columns(task)
        own_columns, own_truth = tally.scores(task)
        first, n = self._first_row(samples) * task.targets, samples * task.targets

        def gather(own: np.ndarray) -> np.ndarray:
            table = np.zeros((n, own.shape[1]))
            table[first : first + len(own)] = own
            return evaluator.sum(table.ravel()).reshape(table.shape)

        classes = None if task.has_labels else gather(own_truth)[:, 0]
        counted = np.ones(n, bool) if classes is None else classes >= 0
        areas = np.zeros((2, columns))  # the area, and whether it is not defined
        for start, stop in _column_ranges(n, columns):
            table = gather(own_columns[:, start:stop])
            truth = gather(own_truth[:, start:stop]) if classes is None else classes
            for column in range(start, stop):
                if column % evaluator.workers == evaluator.worker:
                    is_positive = auc.positives(truth, column - start * task.has_labels, columns)
                    value = auc.area(table[counted, column - start], is_positive[counted])
                    areas[:, column] = (0, 1) if value is None else (value, 0)
        values, are_undefined = evaluator.sum(areas.ravel()).reshape(areas.shape)
        return auc.mean_area(np.where(are_undefined > 0, np.nan, values), task.has_labels)

    def _first_row(self, samples: int) -> int:
        """Return the number of the first sample of this worker's share."""
        evaluator = self._evaluator
        if evaluator.worker is None:
            return 0
        _, own_blocks = share(np.arange(self._blocks), evaluator.worker, evaluator.workers)
        return samples * int(own_blocks[0]) // self._blocks if len(own_blocks) else 0


class _Tally:
    """What a worker adds up, and the scores that it keeps, in one evaluation."""

    def __init__(self, metrics: BoundMetrics):
        self._metrics, self.counts = metrics, np.zeros(metrics.count_size)
        self.sums = np.zeros(metrics.sum_size)  #: of a block
        self._columns: list[np.ndarray] = []
        self._truth: list[np.ndarray] = []

    @property
    def observes(self) -> bool:
        """Whether a metric needs outputs."""
        return bool(self._metrics.names)

    def observe(self, outputs: np.ndarray, targets: Any) -> None:
        """Add the outputs and targets of some samples."""
        observation = self._metrics.observe(outputs, targets)
        self.counts += self._metrics.counts(observation)
        self.sums += self._metrics.sums(observation)
        if self._metrics.has_auc and observation.scores is not None:
            self._columns.append(auc.columns_of(observation.scores))
            truth = observation.scores.truth
            self._truth.append(truth.astype(np.int8) if truth.ndim == 2 else truth[:, None])

    def scores(self, task: Task) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns (rows, columns) and the truth (rows, 1 or labels) of own samples."""
        widths = _columns(task), task.classes if task.has_labels else 1
        columns, truth = (
            np.concatenate([np.zeros((0, width), np.int8), *parts])  # in the dtype of the parts
            for width, parts in zip(widths, (self._columns, self._truth), strict=True)
        )
        return columns, truth


def _sums_over(replica: Replica, samples: Samples, indexes: np.ndarray, tally: _Tally) -> nn.Sums:
    """Return the sums over the samples at `indexes`, read a few at a time."""
    batches = (Batch.of(*rows) for rows in in_pieces(samples, indexes))
    observe = tally.observe if tally.observes else None
    return reduce(nn.add, (replica.evaluate(batch, observe) for batch in batches), {})


def _columns(task: Task) -> int:
    """Return the number of columns of scores: one for two classes."""
    return 1 if task.classes == 2 and not task.has_labels else task.classes


def _column_ranges(n: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns of `n` scores that are gathered at once."""
    width = max(1, GATHERED_BYTES // max(8 * n, 1))
    return ((start, min(start + width, columns)) for start in range(0, columns, width))
