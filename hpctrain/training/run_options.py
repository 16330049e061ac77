"""Options of a run, its batch and its checkpoints: `[run]`, `[checkpoint]`, `[trace]`."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from hpctrain.core import config
from hpctrain.core.config import usercode
from hpctrain.core.errors import UsageError
from hpctrain.core.metrics import Criterion, Direction, make_criterion
from hpctrain.gradients.precision import Precision
from hpctrain.nn.losses import LOSSES, as_class_weights
from hpctrain.nn.metrics import check_metrics

Positive = Annotated[int, Field(ge=1)]
NotFinite = Literal["stop", "skip"]


def _file_name(name: str) -> str:
    """Return a run's name if it is safe in a folder's name and on a terminal."""
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise ValueError("expected a name without '/', control characters and a dot in front")
    return name


@config.options
class ElasticOptions:
    """`[elastic]`: training that goes on after the loss of ranks; see `hpctrain launch --elastic`.

    Engines whose ranks each hold a part of the state copy it to other ranks between steps.
    """

    min_ranks: Positive = 1  #: with fewer the job ends
    copy_steps: Positive = 10  #: from one copy of the state to the next
    copies: Positive = 1  #: ranks that hold a copy of each rank's part


@config.options
class FitOptions:
    """Options of `Trainer.fit` that are seldom needed; a recipe has them in `[run]`."""

    interval_steps: Positive | None = None  #: steps per row of metrics; an epoch if not set
    evaluate_epochs: Positive | None = None  #: epochs from one evaluation to the next; 1 if
    evaluate_steps: Positive | None = None  #: neither is given
    #: Batches that a thread reads ahead; if not set, 2, or 0 for samples in memory.
    prefetch: Annotated[int, Field(ge=0)] | None = None
    timeout_s: Annotated[float, Field(gt=0)] = 300.0  #: until a waiting job is reported as hung
    #: Treatment of a step with a gradient that is not finite: "skip" lets no rank apply it. Workers
    #: with steps of their own each drop such gradients.
    not_finite: NotFinite = "stop"
    max_skipped: Positive | None = None  #: steps in a row that may be skipped; 10 if not given

    @property
    def skip_limit(self) -> int:
        """The limit of skipped steps in a row; 0 for none."""
        return (self.max_skipped or 10) if self.not_finite == "skip" else 0

    def check(self) -> None:
        """Raise UsageError if two options exclude each other."""
        if self.evaluate_epochs and self.evaluate_steps:
            raise UsageError("[run] takes evaluate_epochs or evaluate_steps, not both")
        if self.max_skipped is not None and self.not_finite != "skip":
            raise UsageError(
                "[run] max_skipped: expected not_finite = 'skip' beside it, "
                f"seen '{self.not_finite}'"
            )


@config.options
class RunOptions(FitOptions):
    """`[run]`: exactly one of `epochs` and `steps`."""

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_file_name)]
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    epochs: Positive | None = None
    steps: Positive | None = None
    epoch_samples: Positive | None = None  #: the training set is repeated, or cut, to this number
    #: "module:function", or the keys of CallbackOptions
    callbacks: list[str | dict[str, Any]] = field(default_factory=list)
    metrics: config.Names = field(default_factory=list)  #: of the test set, see `ht.metrics`
    device: Literal["auto", "cpu", "gpu"] = "auto"
    precision: Precision = "float32"

    def check(self) -> None:
        """Raise UsageError if options exclude each other, or for an unknown metric."""
        super().check()
        check_metrics(self.metrics, "[run] metrics")

    @property
    def start_timeout_s(self) -> float:
        """The limit of a wait before the run, in s, while ranks start and read data.

        Ten times `timeout_s` as in the first step, but from 60 to 300 s, or `timeout_s` if longer.
        """
        return max(min(max(10 * self.timeout_s, 60.0), 300.0), self.timeout_s)

    @property
    def callback_options(self) -> list[CallbackOptions]:
        """The callbacks as options; raises UsageError for an unknown key."""
        tables = [{"kind": item} if isinstance(item, str) else item for item in self.callbacks]
        return [config.read(CallbackOptions, table, "run.callbacks") for table in tables]


@config.options
class CallbackOptions:
    """An entry of `[run] callbacks`: a user's function or class, and the ranks that call it."""

    kind: str  #: "module:function" or "module:Class"
    arguments: dict[str, Any] | None = None  #: if given, `kind` is called to make the callback
    ranks: Literal["first", "all"] = "first"

    def make(self, folder: str) -> Any:
        """Return the callback, of code in `folder`; raise UsageError if there is none."""
        place = "[run] callbacks"
        callback = usercode.find(self.kind, place, folder, classes=True)
        if self.arguments is None and not inspect.isclass(callback):
            return callback
        return usercode.call_found(callback, self.kind, place, **self.arguments or {})


@config.options
class BatchOptions:
    """Samples per step: of all ranks together (strong scaling), or per rank (weak scaling).

    A rank's share is computed in `micro_batches` pieces, which need less memory. `base_batch`, for
    weak scaling alone, is the batch for which the recipe's rate was tuned.
    """

    batch: Positive | None = None
    batch_per_rank: Positive | None = None
    base_batch: Positive | None = None
    micro_batches: Positive = 1

    def size(self, ranks: int) -> int:
        """Return the samples of a step over all ranks."""
        return self.batch or (self.batch_per_rank or 0) * ranks

    def rate_factor(self, ranks: int) -> float:
        """Return the factor of the rate: k for a batch of k times `base_batch`.

        Source: the linear scaling rule of Goyal et al. (2017, section 2.1).
        """
        return self.size(ranks) / self.base_batch if self.base_batch else 1.0


class Sizes(NamedTuple):
    """The sizes of a training that follow from the number of its ranks."""

    batch: int  #: samples of a step over all ranks
    rate: float  #: the optimizer's rate, scaled to the batch
    updates_per_step: float  #: of the optimizer


@config.options
class LossOptions:
    """`[loss]`: the name of a loss; without the table the model's own loss is used.

    `class_weights`: of cross_entropy, then the default, a weight for each class, or "balanced".
    """

    kind: str = ""
    class_weights: Any = None

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown loss, and for weights that do not fit it."""
        if not self.kind and self.class_weights is not None:
            object.__setattr__(self, "kind", "cross_entropy")
        config.pick(LOSSES, self.kind or None, "[loss] kind")
        if self.class_weights is not None and self.kind != "cross_entropy":
            raise UsageError(
                f"[loss] class_weights: expected kind = 'cross_entropy', seen '{self.kind}'"
            )
        if isinstance(self.class_weights, str):
            config.pick({"balanced": None}, self.class_weights, "[loss] class_weights")
        elif self.class_weights is not None:
            as_class_weights(self.class_weights, "[loss] class_weights")


@config.options
class CheckpointOptions:
    """`[checkpoint]`: when to save, and how many to keep; the last step is always saved."""

    every_epochs: Positive | None = None
    every_steps: Positive | None = None
    keep: Positive | None = 3
    keep_best: str | None = None  #: the best by this metric is saved at once, and stays
    keep_best_direction: Direction | None = None  #: by default a loss falls, an accuracy rises

    def __post_init__(self) -> None:
        """Raise UsageError for an unknown metric, or a direction without a metric."""
        if self.best is None and self.keep_best_direction is not None:
            raise UsageError(
                "[checkpoint] keep_best_direction: expected the metric keep_best beside it, "
                "seen none"
            )

    @property
    def best(self) -> Criterion | None:
        """The metric `keep_best` with its direction; None if no best checkpoint is kept."""
        if self.keep_best is None:
            return None
        return make_criterion(self.keep_best, self.keep_best_direction, "[checkpoint] keep_best")


def _first_and_end(steps: list[int]) -> list[int]:
    if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
        raise ValueError("expected [first, last], of which the last is not traced")
    return steps


@config.options
class TraceOptions:
    """`[trace]`: whether to record spans, in which steps, and how many."""

    enabled: bool = False
    steps: Annotated[list[int], AfterValidator(_first_and_end)] | None = (
        None  #: [first, last); or all
    )
    max_spans: Positive = 100_000  #: per rank, of about 180 bytes each

    @property
    def traced_steps(self) -> range:
        """The steps to trace."""
        return range(*(self.steps or (0, 1 << 62)))
