"""The alpha-beta model of a step, fitted to what was measured, beyond the measured sizes.

    T(P) = compute(P) + exposed(P) + uneven + other

compute    strong scaling: a + b / P through what was measured; weak: that of the largest size
exposed    the all-reduce of n bytes, replayed message by message on a clock per rank, as
           `hpctrain bench predict` does (tuning/schedules.py): on a ring 2(P-1) messages of n/P
           bytes, each alpha + m beta. What ranks compute meanwhile hides a part (tuning/steps.py)
uneven     waiting that the wire does not explain: for each other; that of the largest size
other      reading, bookkeeping; that of the largest size

alpha and beta are those of single messages between two ranks, where the study has measured such.
All of it is then scaled by one factor, so that the time on the wire is what trials have measured;
without such messages alpha and beta come from the wire times of several sizes, and are those of
usual networks where there is one alone. How many buckets
leave while backward goes on is the number that explains the measured waits best. The three largest
sizes that communicate tell what lies beyond.

Source: Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994, for
alpha + m beta; Alexandrov et al., 1995, for its refinement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hpctrain.bench.predict import Layout, fits
from hpctrain.scaling.sizes import Size
from hpctrain.tuning import cost, fit, guess
from hpctrain.tuning.loggp import Clocks, Cluster, Wire, alike
from hpctrain.tuning.schedules import SCHEDULES
from hpctrain.tuning.steps import even, step_time

#: All-reduces that are no schedule of ours, and the one that is most like them.
LIKE = {"direct-shared": "direct", "native": "halving-doubling"}
#: In how many buckets the gradient may leave; 0: after backward, in one.
BUCKETS = (0, 1, 2, 4, 8, 16, 32)
HIDDEN = 0.03  #: of the wire: where less is hidden behind compute, nothing overlaps
MESSAGES, WIRE_TIMES, GUESS = "single messages", "wire times of several sizes", "usual networks"
NEAREST = 3  #: so many sizes, the largest, tell what lies beyond them


@dataclass(frozen=True)
class Seen:
    """What was measured of a size: seconds of a step; `share` ranks shared a core."""

    size: Size
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    algorithm: str | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """What a step is predicted to take on a size, in seconds."""

    size: Size
    step_s: float
    compute_s: float
    wire_s: float
    wait_s: float
    other_s: float


@dataclass(frozen=True)
class Model:
    """A machine and a step, fitted to measurements."""

    cluster: Cluster
    nbytes: int
    algorithm: str
    buckets: int
    shrinking_s: float  #: compute that ranks share: compute(P) = shrinking_s / P + fixed_s
    fixed_s: float
    across: bool
    origin: str  #: of alpha and beta: MESSAGES, WIRE_TIMES or GUESS
    ranks: tuple[int, ...]  #: sizes that it was fitted to
    uneven_s: float = 0.0
    other_s: float = 0.0

    @property
    def tested(self) -> bool:
        """Whether more sizes communicate than it has unknowns, so that it could fail to meet them.

        With messages the unknown is one factor, without them alpha and beta.
        """
        return len(self.ranks) > (2 if self.origin == WIRE_TIMES else 1)

    @property
    def wire(self) -> Wire:
        """The wire that most bytes take: between nodes, where there are several."""
        return self.cluster.between if self.across else self.cluster.inside

    @property
    def alpha_s(self) -> float:
        """Seconds of a short message."""
        return self.wire.latency + 2 * self.wire.overhead

    @property
    def beta_s(self) -> float:
        """Seconds per byte."""
        return self.wire.per_byte_both

    def forecast(self, size: Size, share: float = 1.0) -> Forecast:
        """Return what a step takes on `size` where `share` ranks share a core."""
        own = self.shrinking_s / size.ranks + self.fixed_s
        wire, exposed = replay(
            self.cluster, self.algorithm, self.nbytes, size, own, self.buckets, share
        )
        compute, wait = own * share, max(0.0, exposed + self.uneven_s)
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
    """Return the seconds on the wire of a step, and those that compute does not hide.

    `compute` is that of a rank with a core of its own; where `share` ranks have one, all that
    processors do takes as much longer.
    """
    if size.ranks == 1:
        return 0.0, 0.0
    layout = Layout(size.ranks, size.per_node)
    name = algorithm if fits(algorithm, layout) else "ring"
    step = even(compute, nbytes, nbytes / max(buckets, 1))
    clocks = Clocks(cluster, layout.nodes, slow=share)
    took = step_time(step, SCHEDULES[name], clocks, overlap=buckets > 0)
    return took.wire, took.exposed


def schedule_of(algorithm: str | None) -> str:
    """Return the schedule of what summary.json names, such as "auto (ring, native)"."""
    for word in re.findall(r"[a-z-]+", algorithm or ""):
        if (name := LIKE.get(word, word)) in SCHEDULES:
            return name
    return "ring"


def fitted(
    seen: Sequence[Seen], nbytes: int, strong: bool, inside: Wire | None, between: Wire | None
) -> Model | None:
    """Return the model of what was `seen`, sizes ascending; None where no ranks communicated.

    Sizes whose ranks share cores count only where there are no others with more than one rank.
    """
    apart = [one for one in seen if one.share == 1.0]
    used = apart if any(one.size.ranks > 1 for one in apart) else list(seen)
    talking = [one for one in used if one.size.ranks > 1 and one.wire_s > 0][-NEAREST:]
    if not talking:
        return None
    last = talking[-1]
    overlaps = any(one.wait_s < (1 - HIDDEN) * one.wire_s for one in talking)
    counts = BUCKETS if overlaps else BUCKETS[:1]
    shrinking, fixed = _computing(used, strong)
    cluster = _cluster(talking, nbytes, inside, between)
    across = any(one.size.nodes > 1 for one in talking)
    buckets, factor = min(
        ((count, _factor(cluster, talking, nbytes, count)) for count in counts),
        key=lambda found: _off(scaled(cluster, found[1]), talking, nbytes, found[0]),
    )
    model = Model(
        scaled(cluster, factor),
        nbytes,
        schedule_of(last.algorithm),
        buckets,
        shrinking,
        fixed,
        across,
        _origin(between if across else inside, talking, nbytes, across),
        tuple(one.size.ranks for one in talking),
    )
    exposed = model.forecast(last.size, last.share).wait_s
    other = max(0.0, last.step_s - last.compute_s - last.wait_s)
    return replace(model, uneven_s=last.wait_s - exposed, other_s=other)


def _computing(seen: Sequence[Seen], strong: bool) -> tuple[float, float]:
    """Return (b, a) of the compute b / P + a of a rank with a core of its own.

    Times that a sum of these misses, as where a smaller share fits into the cache, are met at the
    largest size: the sum is scaled, so that what is predicted beyond stays above nothing.
    """
    if not strong:
        return 0.0, seen[-1].compute_s / seen[-1].share
    ranks = np.array([one.size.ranks for one in seen], float)
    own = np.array([one.compute_s / one.share for one in seen])
    b, a = fit.nonnegative(np.stack([1 / ranks, np.ones_like(ranks)], 1), own).tolist()
    met = own[-1] / (b / ranks[-1] + a)
    return b * met, a * met


def _cluster(
    talking: Sequence[Seen], nbytes: int, inside: Wire | None, between: Wire | None
) -> Cluster:
    """Return the machine before it is scaled: measured messages, else wire times, else guesses."""
    near, far = alike(guess.NODE), alike(guess.ACROSS)
    return replace(
        near,
        inside=inside or _from_wire_times(_over(False, talking), nbytes) or near.inside,
        between=between or _from_wire_times(_over(True, talking), nbytes) or far.between,
    )


def _origin(measured: Wire | None, talking: Sequence[Seen], nbytes: int, across: bool) -> str:
    """Return where `_cluster` has the wire from that most bytes take."""
    if measured is not None:
        return MESSAGES
    return WIRE_TIMES if _from_wire_times(_over(across, talking), nbytes) else GUESS


def _over(nodes: bool, talking: Sequence[Seen]) -> list[Seen]:
    """Return the sizes on several nodes, or those on one."""
    return [one for one in talking if (one.size.nodes > 1) == nodes]


def _from_wire_times(seen: Sequence[Seen], nbytes: int) -> Wire | None:
    """Return the wire on which the longest paths of the all-reduces take what was measured.

    Of two sizes or more: from one alone nobody can tell messages from bytes.
    """
    paths = [
        (formula(nbytes, one.size.ranks), one.wire_s)
        for one in seen
        if (formula := cost.ALLREDUCE.get(schedule_of(one.algorithm)))
    ]
    if len({path.steps for path, _ in paths}) < 2:
        return None
    table = np.array([(path.steps, path.bytes) for path, _ in paths], float)
    alpha, beta = fit.nonnegative(table, np.array([seconds for _, seconds in paths])).tolist()
    return alike(cost.Machine(alpha, beta, 0.0)).inside


def _factor(cluster: Cluster, talking: Sequence[Seen], nbytes: int, buckets: int) -> float:
    """Return what all costs are multiplied by for the measured time on the wire: a mean."""
    ratios = [one.wire_s / _replayed(cluster, one, nbytes, buckets)[0] for one in talking]
    return float(np.exp(np.mean(np.log(ratios))))


def _off(cluster: Cluster, talking: Sequence[Seen], nbytes: int, buckets: int) -> float:
    """Return how far exposed times lie from the measured waits, as shares of steps, squared."""
    errors = [
        (_replayed(cluster, one, nbytes, buckets)[1] - min(one.wait_s, one.wire_s)) / one.step_s
        for one in talking
    ]
    return float(np.sum(np.square(errors)))


def _replayed(cluster: Cluster, one: Seen, nbytes: int, buckets: int) -> tuple[float, float]:
    name = schedule_of(one.algorithm)
    own = one.compute_s / one.share
    return replay(cluster, name, nbytes, one.size, own, buckets, one.share)


def scaled(cluster: Cluster, factor: float) -> Cluster:
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
        wire.per_byte * factor,
        None if wire.both_ways is None else wire.both_ways * factor,
    )
