"""The alpha-beta model of a step, fitted to measurements, for sizes beyond the measured ones.

    T(P) = compute(P) + exposed(P) + uneven + other

compute    strong scaling: a + b / P fitted to the measured times; weak: that of the largest size
exposed    the all-reduce of n bytes, replayed message by message on a clock per rank, as
           `hpctrain bench predict` does (message_schedules.py): on a ring 2(P-1) messages
           of n/P bytes, each alpha + m beta. Overlapped compute hides a part of it
uneven     waiting that the wire does not explain: for each other; that of the largest size
other      reading, bookkeeping; that of the largest size

alpha and beta are those of single messages between two ranks, if the study has measured such. All
costs are then scaled by one factor, so that the time on the wire is the one measured in trials.
Without such messages alpha and beta come from the wire times of several sizes, and are those of
usual networks if there is only one size. The number of buckets that leave during backward is the
one that explains the measured waits best. The model is fitted to the three largest sizes that
communicate.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994, for
alpha + m beta; Alexandrov et al., 1995, for its refinement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hpctrain.bench.prediction.predict import RankLayout, applies_to
from hpctrain.cost_model import cost, fit
from hpctrain.cost_model.loggp import Clocks, Cluster, Wire, uniform_cluster
from hpctrain.cost_model.message_schedules import SCHEDULES
from hpctrain.cost_model.training_step import even_step, step_time
from hpctrain.scaling.world_sizes import Size
from hpctrain.tuning import defaults

#: All-reduces without a schedule in hpctrain, and the schedule nearest to each.
LIKE = {"direct-shared": "direct", "native": "halving-doubling"}
#: In how many buckets the gradient may leave; 0: after backward, in one.
BUCKETS = (0, 1, 2, 4, 8, 16, 32)
MIN_OVERLAP = 0.03  #: of the wire: where less is hidden behind compute, nothing overlaps
MESSAGES, WIRE_TIMES, NOMINAL = "single messages", "wire times of several sizes", "usual networks"
FITTED_SIZES = 3  #: the number of sizes, the largest ones, that the model is fitted to


@dataclass(frozen=True)
class StepTimes:
    """The measured times of a step on one size, in seconds; `share` ranks shared a core."""

    size: Size
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    algorithm: str | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """The predicted times of a step on one size, in seconds."""

    size: Size
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    other_s: float


@dataclass(frozen=True)
class StepModel:
    """A machine and a step, fitted to measurements."""

    cluster: Cluster
    nbytes: int
    algorithm: str
    buckets: int
    shrinking_s: float  #: compute that ranks share: compute(P) = shrinking_s / P + fixed_s
    fixed_s: float
    across: bool
    origin: str  #: of alpha and beta: MESSAGES, WIRE_TIMES or NOMINAL
    ranks: tuple[int, ...]  #: sizes that it was fitted to
    uneven_s: float = 0.0
    other_s: float = 0.0

    @property
    def tested(self) -> bool:
        """Whether more sizes communicate than the model has unknowns, so that it could miss them.

        With messages the unknown is one factor, without them alpha and beta.
        """
        return len(self.ranks) > (2 if self.origin == WIRE_TIMES else 1)

    @property
    def wire(self) -> Wire:
        """The wire of most bytes: between nodes, if there are several."""
        return self.cluster.between if self.across else self.cluster.inside

    @property
    def alpha_s(self) -> float:
        """Seconds of a short message."""
        return self.wire.latency + 2 * self.wire.overhead

    @property
    def beta_s(self) -> float:
        """Seconds per byte."""
        return self.wire.seconds_per_byte_both

    def forecast(self, size: Size, share: float = 1.0) -> Forecast:
        """Return the predicted times of a step on `size` where `share` ranks share a core."""
        compute_per_share = self.shrinking_s / size.ranks + self.fixed_s
        wire, exposed = replay(
            self.cluster, self.algorithm, self.nbytes, size, compute_per_share, self.buckets, share
        )
        compute, wait = compute_per_share * share, max(0.0, exposed + self.uneven_s)
        return Forecast(size, compute + wait + self.other_s, compute, wire, wait, self.other_s)


@cache
def replay(
    cluster: Cluster,
    algorithm: str,
    nbytes: int,
    size: Size,
    compute: float,
    buckets: int,
    share: float = 1.0,
) -> tuple[float, float]:
    """Return the seconds of a step on the wire, and those of them that compute does not hide.

    `compute` is that of a rank with a core of its own; where `share` ranks have one, all work of
    processors takes as much longer.
    """
    if size.ranks == 1:
        return 0.0, 0.0
    layout = RankLayout(size.ranks, size.per_node)
    name = algorithm if applies_to(algorithm, layout) else "ring"
    step = even_step(compute, nbytes, nbytes / max(buckets, 1))
    clocks = Clocks(cluster, layout.nodes, slow_factors=share)
    result = step_time(step, SCHEDULES[name], clocks, overlap=buckets > 0)
    return result.wire, result.exposed


def schedule_of(algorithm: str | None) -> str:
    """Return the schedule of an algorithm in summary.json, such as "auto (ring, native)"."""
    for word in re.findall(r"[a-z-]+", algorithm or ""):
        if (name := LIKE.get(word, word)) in SCHEDULES:
            return name
    return "ring"


def fit_model(
    steps: Sequence[StepTimes], nbytes: int, strong: bool, inside: Wire | None, between: Wire | None
) -> StepModel | None:
    """Return the model fitted to `steps`, sizes ascending; None where no ranks communicated.

    Sizes whose ranks share cores count only where there are no others with more than one rank.
    """
    own_cores = [step for step in steps if step.share == 1.0]
    used_steps = own_cores if any(step.size.ranks > 1 for step in own_cores) else list(steps)
    communicating = [step for step in used_steps if step.size.ranks > 1 and step.wire_s > 0]
    communicating = communicating[-FITTED_SIZES:]
    if not communicating:
        return None
    largest_step = communicating[-1]
    overlaps = any(step.wait_s < (1 - MIN_OVERLAP) * step.wire_s for step in communicating)
    counts = BUCKETS if overlaps else BUCKETS[:1]
    shrinking, fixed = _compute_law(used_steps, strong)
    cluster = _cluster(communicating, nbytes, inside, between)
    across = any(step.size.nodes > 1 for step in communicating)
    buckets, factor = min(
        ((count, _factor(cluster, communicating, nbytes, count)) for count in counts),
        key=lambda candidate: _wait_error(
            scale_cluster(cluster, candidate[1]), communicating, nbytes, candidate[0]
        ),
    )
    model = StepModel(
        scale_cluster(cluster, factor),
        nbytes,
        schedule_of(largest_step.algorithm),
        buckets,
        shrinking,
        fixed,
        across,
        _origin(between if across else inside, communicating, nbytes, across),
        tuple(step.size.ranks for step in communicating),
    )
    exposed = model.forecast(largest_step.size, largest_step.share).wait_s
    other_s = max(0.0, largest_step.step_s - largest_step.compute_s - largest_step.wait_s)
    return replace(model, uneven_s=largest_step.wait_s - exposed, other_s=other_s)


def _compute_law(steps: Sequence[StepTimes], strong: bool) -> tuple[float, float]:
    """Return (b, a) of the compute b / P + a of a rank with a core of its own.

    Where such a sum misses the times, as where a smaller share fits into the cache, it is scaled to
    the time of the largest size, so that predictions beyond it stay positive.
    """
    if not strong:
        return 0.0, steps[-1].compute_s / steps[-1].share
    ranks = np.array([step.size.ranks for step in steps], float)
    compute_per_share = np.array([step.compute_s / step.share for step in steps])
    terms = np.stack([1 / ranks, np.ones_like(ranks)], 1)
    b, a = fit.nonnegative(terms, compute_per_share).tolist()
    factor = compute_per_share[-1] / (b / ranks[-1] + a)
    return b * factor, a * factor


def _cluster(
    steps: Sequence[StepTimes], nbytes: int, inside: Wire | None, between: Wire | None
) -> Cluster:
    """Return the machine before it is scaled: measured messages, else wire times, else guesses."""
    node_cluster, network_cluster = uniform_cluster(defaults.NODE), uniform_cluster(defaults.ACROSS)
    return replace(
        node_cluster,
        inside=inside
        or _from_wire_times(_sizes(steps, several_nodes=False), nbytes)
        or node_cluster.inside,
        between=between
        or _from_wire_times(_sizes(steps, several_nodes=True), nbytes)
        or network_cluster.between,
    )


def _origin(measured: Wire | None, steps: Sequence[StepTimes], nbytes: int, across: bool) -> str:
    """Return the origin of the wire of most bytes in `_cluster`."""
    if measured is not None:
        return MESSAGES
    return WIRE_TIMES if _from_wire_times(_sizes(steps, several_nodes=across), nbytes) else NOMINAL


def _sizes(steps: Sequence[StepTimes], *, several_nodes: bool) -> list[StepTimes]:
    """Return the sizes on several nodes, or those on one."""
    return [step for step in steps if (step.size.nodes > 1) == several_nodes]


def _from_wire_times(steps: Sequence[StepTimes], nbytes: int) -> Wire | None:
    """Return the wire on which the longest paths of the all-reduces take the measured times.

    Needs two sizes or more: one alone cannot separate the cost of messages from that of bytes.
    """
    paths = [
        (formula(nbytes, step.size.ranks), step.wire_s)
        for step in steps
        if (formula := cost.ALLREDUCE.get(schedule_of(step.algorithm)))
    ]
    if len({path.steps for path, _ in paths}) < 2:
        return None
    table = np.array([(path.steps, path.bytes) for path, _ in paths], float)
    alpha, beta = fit.nonnegative(table, np.array([seconds for _, seconds in paths])).tolist()
    return uniform_cluster(cost.Machine(alpha, beta, 0.0)).inside


def _factor(cluster: Cluster, steps: Sequence[StepTimes], nbytes: int, buckets: int) -> float:
    """Return the factor from modelled to measured time on the wire: a geometric mean."""
    ratios = [step.wire_s / _replay_step(cluster, step, nbytes, buckets)[0] for step in steps]
    return float(np.exp(np.mean(np.log(ratios))))


def _wait_error(cluster: Cluster, steps: Sequence[StepTimes], nbytes: int, buckets: int) -> float:
    """Return the squared error of exposed times against measured waits, as shares of steps."""
    errors = [
        (_replay_step(cluster, step, nbytes, buckets)[1] - min(step.wait_s, step.wire_s))
        / step.step_s
        for step in steps
    ]
    return float(np.sum(np.square(errors)))


def _replay_step(
    cluster: Cluster, step: StepTimes, nbytes: int, buckets: int
) -> tuple[float, float]:
    name = schedule_of(step.algorithm)
    compute_per_share = step.compute_s / step.share
    return replay(cluster, name, nbytes, step.size, compute_per_share, buckets, step.share)


def scale_cluster(cluster: Cluster, factor: float) -> Cluster:
    """Return the machine on which every message, and adding, takes `factor` times as long."""
    return Cluster(
        _slower(cluster.inside, factor),
        _slower(cluster.between, factor),
        cluster.gamma * factor,
        cluster.memory * factor,
        cluster.cards,
    )


def _slower(wire: Wire, factor: float) -> Wire:
    return Wire(
        wire.latency * factor,
        wire.overhead * factor,
        wire.gap * factor,
        wire.seconds_per_byte * factor,
        None if wire.seconds_per_byte_duplex is None else wire.seconds_per_byte_duplex * factor,
    )
