"""The alpha-beta model of a step, fitted to measured sizes, predicts larger ones.

    T(P) = compute(P) + exposed(P) + uneven + other

compute    strong scaling: a + b / P fitted to the measured times; weak: as at the largest size
exposed    the all-reduce of n bytes minus the part hidden behind compute. Its messages are
           replayed on one clock per rank (message_schedules.py), each alpha + m beta
uneven     waiting for slower ranks, which the wire does not explain; as at the largest size
other      reading data, bookkeeping; as at the largest size

alpha and beta come from single messages between two ranks, if the study has measured them. One
factor then scales all costs to the wire times of the trials. Without single messages alpha and beta
are fitted to the wire times of several sizes, or are defaults if only one size communicates. The
number of buckets sent during backward is the one that explains the measured waits best. The model
is fitted to the three largest sizes that communicate.

Sources: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994, for
alpha + m beta; Alexandrov et al., 1995, for its refinement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hpctrain.tools.bench.prediction.predict import RankLayout, applies_to
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tuning import defaults
from hpctrain.tuning.model import cost, fit
from hpctrain.tuning.model.loggp import Clocks, Cluster, Wire, uniform_cluster
from hpctrain.tuning.model.message_schedules import SCHEDULES
from hpctrain.tuning.model.training_step import step_time, uniform_step

#: All-reduces without a schedule in the cost model, and the most similar schedule.
NEAREST_SCHEDULE = {"direct-shared": "direct", "native": "halving-doubling"}
#: Candidate numbers of buckets; 0: the gradient is sent after backward.
BUCKET_COUNTS = (0, 1, 2, 4, 8, 16, 32)
MIN_HIDDEN_SHARE = 0.03  #: of the wire time; with less hidden behind compute, nothing overlaps
FROM_MESSAGES, FROM_WIRE_TIMES = "single messages", "wire times of several sizes"
FROM_DEFAULTS = "usual networks"
MAX_FITTED_SIZES = 3  #: the model is fitted to the largest sizes


@dataclass(frozen=True)
class StepTimes:
    """The times of a step at one size, in seconds; `share` ranks share a core.

    `other_s` is the rest of a predicted step; of a measured one it is not read.
    """

    size: Size
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    algorithm: str | None = None
    share: float = 1.0
    other_s: float = 0.0


@dataclass(frozen=True)
class StepModel:
    """A machine and a step, fitted to measurements."""

    cluster: Cluster
    nbytes: int
    algorithm: str
    buckets: int
    shrinking_s: float  #: parallel part of compute: compute(P) = shrinking_s / P + fixed_s
    fixed_s: float
    across: bool
    origin: str  #: of alpha and beta: FROM_MESSAGES, FROM_WIRE_TIMES or FROM_DEFAULTS
    ranks: tuple[int, ...]  #: of the fitted sizes
    uneven_s: float = 0.0
    other_s: float = 0.0

    @property
    def tested(self) -> bool:
        """Whether the fit has more sizes than unknowns: one factor, or alpha and beta."""
        return len(self.ranks) > (2 if self.origin == FROM_WIRE_TIMES else 1)

    @property
    def wire(self) -> Wire:
        """The wire that limits: between nodes, if there are several."""
        return self.cluster.between if self.across else self.cluster.inside

    @property
    def alpha_s(self) -> float:
        """Seconds per short message."""
        return self.wire.latency + 2 * self.wire.overhead

    @property
    def beta_s(self) -> float:
        """Seconds per byte."""
        return self.wire.duplex_seconds_per_byte

    def forecast(self, size: Size, share: float = 1.0) -> StepTimes:
        """Return the predicted times of a step at `size` if `share` ranks share a core."""
        own_compute_s = self.shrinking_s / size.ranks + self.fixed_s
        wire, exposed = predict_communication(
            self.cluster, self.algorithm, self.nbytes, size, own_compute_s, self.buckets, share
        )
        compute_s, wait_s = own_compute_s * share, max(0.0, exposed + self.uneven_s)
        step_s = compute_s + wait_s + self.other_s
        return StepTimes(size, step_s, compute_s, wire, wait_s, other_s=self.other_s)


@cache
def predict_communication(
    cluster: Cluster,
    algorithm: str,
    nbytes: int,
    size: Size,
    compute_s: float,
    buckets: int,
    share: float = 1.0,
) -> tuple[float, float]:
    """Return the wire time of a step and its exposed part, in seconds.

    `compute_s` is the compute time of a rank with its own core. If `share` ranks share a core, all
    work of processors takes `share` times as long.
    """
    if size.ranks == 1:
        return 0.0, 0.0
    layout = RankLayout(size.ranks, size.per_node)
    schedule = algorithm if applies_to(algorithm, layout) else "ring"
    step = uniform_step(compute_s, nbytes, nbytes / max(buckets, 1))
    clocks = Clocks(cluster, layout.nodes, slow_factors=share)
    result = step_time(step, SCHEDULES[schedule], clocks, overlap=buckets > 0)
    return result.wire, result.exposed


def choose_schedule(algorithm: str | None) -> str:
    """Return the schedule for an algorithm of summary.json such as "auto (ring, native)"."""
    for word in re.findall(r"[a-z-]+", algorithm or ""):
        if (name := NEAREST_SCHEDULE.get(word, word)) in SCHEDULES:
            return name
    return "ring"


def fit_model(
    steps: Sequence[StepTimes], nbytes: int, strong: bool, inside: Wire | None, between: Wire | None
) -> StepModel | None:
    """Return the model fitted to `steps` of ascending size; None if no ranks communicated.

    Oversubscribed sizes count only if no other size has more than one rank.
    """
    own_core_steps = [step for step in steps if step.share == 1.0]
    basis = own_core_steps if any(step.size.ranks > 1 for step in own_core_steps) else list(steps)
    fitted_steps = [step for step in basis if step.size.ranks > 1 and step.wire_s > 0]
    fitted_steps = fitted_steps[-MAX_FITTED_SIZES:]
    if not fitted_steps:
        return None
    largest_step = fitted_steps[-1]
    has_overlap = any(step.wait_s < (1 - MIN_HIDDEN_SHARE) * step.wire_s for step in fitted_steps)
    bucket_counts = BUCKET_COUNTS if has_overlap else BUCKET_COUNTS[:1]
    shrinking_s, fixed_s = _fit_compute_law(basis, strong)
    cluster = _make_cluster(fitted_steps, nbytes, inside, between)
    across = any(step.size.nodes > 1 for step in fitted_steps)
    buckets, factor = min(
        ((count, _wire_factor(cluster, fitted_steps, nbytes, count)) for count in bucket_counts),
        key=lambda candidate: _wait_error(
            scale_cluster(cluster, candidate[1]), fitted_steps, nbytes, candidate[0]
        ),
    )
    model = StepModel(
        scale_cluster(cluster, factor),
        nbytes,
        choose_schedule(largest_step.algorithm),
        buckets,
        shrinking_s,
        fixed_s,
        across,
        _wire_origin(between if across else inside, fitted_steps, nbytes, across),
        tuple(step.size.ranks for step in fitted_steps),
    )
    exposed_s = model.forecast(largest_step.size, largest_step.share).wait_s
    other_s = max(0.0, largest_step.step_s - largest_step.compute_s - largest_step.wait_s)
    return replace(model, uneven_s=largest_step.wait_s - exposed_s, other_s=other_s)


def _fit_compute_law(steps: Sequence[StepTimes], strong: bool) -> tuple[float, float]:
    """Return (b, a) of the compute time b / P + a of a rank with its own core.

    The fit is scaled to the time of the largest size: it may miss that time, for example if small
    shares fit into the cache, and predictions must stay positive.
    """
    if not strong:
        return 0.0, steps[-1].compute_s / steps[-1].share
    ranks = np.array([step.size.ranks for step in steps], float)
    compute_s = np.array([step.compute_s / step.share for step in steps])
    terms = np.stack([1 / ranks, np.ones_like(ranks)], 1)
    b, a = fit.solve_nonnegative(terms, compute_s).tolist()
    factor = compute_s[-1] / (b / ranks[-1] + a)
    return b * factor, a * factor


def _make_cluster(
    steps: Sequence[StepTimes], nbytes: int, inside: Wire | None, between: Wire | None
) -> Cluster:
    """Return the unscaled machine: from single messages, wire times or defaults."""
    node_cluster = uniform_cluster(defaults.INTRA_NODE)
    network_cluster = uniform_cluster(defaults.INTER_NODE)
    return replace(
        node_cluster,
        inside=inside or _fit_wire_times(steps, nbytes, several_nodes=False) or node_cluster.inside,
        between=between
        or _fit_wire_times(steps, nbytes, several_nodes=True)
        or network_cluster.between,
    )


def _wire_origin(
    measured: Wire | None, steps: Sequence[StepTimes], nbytes: int, across: bool
) -> str:
    """Return the origin of the limiting wire of `_make_cluster`."""
    if measured is not None:
        return FROM_MESSAGES
    return (
        FROM_WIRE_TIMES if _fit_wire_times(steps, nbytes, several_nodes=across) else FROM_DEFAULTS
    )


def _fit_wire_times(steps: Sequence[StepTimes], nbytes: int, *, several_nodes: bool) -> Wire | None:
    """Return the wire on which the critical paths of the all-reduces take the measured times.

    None for less than two sizes: one size cannot separate alpha from beta.
    """
    samples = [
        (cost_of(nbytes, step.size.ranks), step.wire_s)
        for step in steps
        if (step.size.nodes > 1) == several_nodes
        and (cost_of := cost.ALLREDUCE.get(choose_schedule(step.algorithm)))
    ]
    if len({path.steps for path, _ in samples}) < 2:
        return None
    coefficients = np.array([(path.steps, path.bytes) for path, _ in samples], float)
    measured_s = np.array([seconds for _, seconds in samples])
    alpha, beta = fit.solve_nonnegative(coefficients, measured_s).tolist()
    return uniform_cluster(cost.Machine(alpha, beta, 0.0)).inside


def _wire_factor(cluster: Cluster, steps: Sequence[StepTimes], nbytes: int, buckets: int) -> float:
    """Return the geometric mean of measured over modelled wire times."""
    ratios = [step.wire_s / _predict_wire(cluster, step, nbytes, buckets)[0] for step in steps]
    return float(np.exp(np.mean(np.log(ratios))))


def _wait_error(cluster: Cluster, steps: Sequence[StepTimes], nbytes: int, buckets: int) -> float:
    """Return the squared error of modelled exposed times, relative to the steps."""
    errors = [
        (_predict_wire(cluster, step, nbytes, buckets)[1] - min(step.wait_s, step.wire_s))
        / step.step_s
        for step in steps
    ]
    return float(np.sum(np.square(errors)))


def _predict_wire(
    cluster: Cluster, step: StepTimes, nbytes: int, buckets: int
) -> tuple[float, float]:
    schedule = choose_schedule(step.algorithm)
    own_compute_s = step.compute_s / step.share
    return predict_communication(
        cluster, schedule, nbytes, step.size, own_compute_s, buckets, step.share
    )


def scale_cluster(cluster: Cluster, factor: float) -> Cluster:
    """Return the machine on which messages and additions take `factor` times as long."""
    return Cluster(
        _scale_wire(cluster.inside, factor),
        _scale_wire(cluster.between, factor),
        cluster.gamma * factor,
        cluster.memory * factor,
        cluster.cards,
    )


def _scale_wire(wire: Wire, factor: float) -> Wire:
    return Wire(
        wire.latency * factor,
        wire.overhead * factor,
        wire.gap * factor,
        wire.seconds_per_byte * factor,
        None if wire.seconds_per_byte_duplex is None else wire.seconds_per_byte_duplex * factor,
    )
