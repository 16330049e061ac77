"""From trials to the rows of a study: a row per size, then rows that are predicted.

Each repeat is one pass over all sizes; so speed-up and efficiency are ratios within a repeat, whose
mean and interval are told: what slowed a whole pass down cancels out. With rate r in samples/s on
P ranks, and the smallest size that was measured as base,

    speed-up = r(P) / r(base)          efficiency = speed-up x base / P

in strong scaling and in weak scaling alike, where r(P) belongs to a larger problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from hpctrain.scaling import laws
from hpctrain.scaling.collect import Gap, Trial
from hpctrain.scaling.forecast import Model, Seen, fitted
from hpctrain.scaling.sizes import Size
from hpctrain.scaling.student import Estimate, estimate
from hpctrain.scaling.study import Study
from hpctrain.tuning.loggp import Wire

Row = dict[str, Any]
Found = Mapping[Size, Sequence[Trial | Gap]]  #: of each size a trial, or a gap, per repeat
Wires = tuple[Wire | None, Wire | None]  #: in a node, between nodes
Single = Sequence[tuple[Model, float]]  #: models of single repeats, samples/s of the smallest size
BEYOND = (2, 4, 8)  #: predicted sizes, as multiples of the largest that the model was fitted to
PARTS = ("step_s", "compute_s", "wire_s", "wait_s", "other_s")


@dataclass(frozen=True)
class Result:
    """All that is known of a study; `rows` are dicts, as JSON and CSV have them."""

    study: Study
    rows: list[Row]
    law: str  #: amdahl or gustafson
    serial: Estimate | None  #: fraction, None with less than two sizes
    law_ranks: tuple[int, ...]  #: sizes that the law was fitted to
    law_misfit: float | None  #: the largest share by which they miss it; two sizes meet any law
    model: Model | None
    machine: dict[str, Any]  #: the facts of the study, and what trials have seen

    @property
    def tested(self) -> bool:
        """Whether a measured size could have told that the model is wrong.

        One whose ranks share cores can: it is forecast too, and not fitted to.
        """
        shared = [row for row in self.of("measured") if row["ranks_per_core"] > 1]
        beside = any("prediction_error" in row for row in shared)
        return self.model is not None and (self.model.tested or beside)

    def of(self, kind: str) -> list[Row]:
        """Return the rows that are measured, a gap, or predicted."""
        return [row for row in self.rows if row["kind"] == kind]


@dataclass(frozen=True)
class Measured:
    """A size with its trials by repeat."""

    size: Size
    trials: Mapping[int, Trial]
    share: float

    def mean(self, name: str) -> float:
        """Return the mean over trials."""
        return fmean(getattr(one, name) for one in self.trials.values())

    def median(self, name: str) -> float:
        """Return the median over trials."""
        return median(getattr(one, name) for one in self.trials.values())

    def speed_ups(self, base: Measured) -> list[float]:
        """Return the ratios to the samples/s of `base`, of each repeat in which both are there."""
        pairs = sorted(self.trials.keys() & base.trials.keys())
        ratios = [self.trials[i].samples_per_s / base.trials[i].samples_per_s for i in pairs]
        return ratios or [self.mean("samples_per_s") / base.mean("samples_per_s")]

    def efficiencies(self, base: Measured) -> list[float]:
        """Return the same as shares of the ideal."""
        return [ratio * base.size.ranks / self.size.ranks for ratio in self.speed_ups(base)]

    @property
    def seen(self) -> Seen:
        """What a forecast is fitted to: medians, which one disturbed repeat does not move."""
        times = {name: self.median(name) for name in PARTS[:-1]}
        last = self.trials[max(self.trials)]
        return Seen(self.size, **times, algorithm=last.algorithm, share=self.share)


def measured(study: Study, found: Found) -> list[Measured]:
    """Return the sizes of which at least one trial is there."""
    trials = {
        size: {i: one for i, one in enumerate(found[size]) if isinstance(one, Trial)}
        for size in study.sizes
    }
    return [Measured(size, some, study.share(size)) for size, some in trials.items() if some]


def result(study: Study, found: Found, wires: Wires = (None, None)) -> Result:
    """Return the result of the trials `found`, of each size one per repeat."""
    sizes = measured(study, found)
    strong = study.mode == "strong"
    seen = [one.seen for one in sizes]
    rows = [
        _measured(one, sizes[0]) | _backcast(study, seen[:i], one, wires)
        for i, one in enumerate(sizes)
    ]
    rows += [_gap(size) for size in study.sizes if size not in {one.size for one in sizes}]
    rows.sort(key=lambda row: (row["ranks"], row["nodes"]))
    for row in rows:
        gaps = [one for one in found[Size(row["ranks"], row["nodes"])] if isinstance(one, Gap)]
        row |= {"repeats_missing": len(gaps), "reason": gaps[0].reason if gaps else None}
    model = _model(study, seen, wires)
    beyond = _predicted(study, model, sizes, _single(study, sizes, wires)) if model else []
    trials = [trial for one in sizes for trial in one.trials.values()]
    hosts = sorted({host for trial in trials for host in trial.hosts})
    machine = study.machine | _machine(trials, hosts)
    law = "amdahl" if strong else "gustafson"
    fit = _serial(sizes, strong)
    return Result(study, [*rows, *beyond], law, *fit, model, machine)


def _machine(trials: Sequence[Trial], hosts: Sequence[str]) -> dict[str, Any]:
    """Return what trials have seen of their machine; a list where they have seen several things."""
    found: dict[str, Any] = {"hosts_seen": hosts}
    for name in dict.fromkeys(name for trial in trials for name in trial.machine):
        values = [trial.machine[name] for trial in trials if name in trial.machine]
        distinct = [value for i, value in enumerate(values) if value not in values[:i]]
        found[name] = distinct[0] if len(distinct) == 1 else distinct
    return found


def _model(study: Study, seen: Sequence[Seen], wires: Wires) -> Model | None:
    """Return the model of `seen`; None for regimes whose steps are no all-reduce of a gradient."""
    if study.tables.get("engine", {}).get("kind", "allreduce") != "allreduce":
        return None
    return fitted(seen, study.gradient_bytes, study.mode == "strong", *wires)


def _measured(one: Measured, base: Measured) -> Row:
    rate = estimate([trial.samples_per_s for trial in one.trials.values()])
    return {
        "kind": "measured",
        "ranks": one.size.ranks,
        "nodes": one.size.nodes,
        "repeats": len(one.trials),
        **_estimated("samples_per_s", rate),
        **_estimated("speed_up", _of_base(one, base, one.speed_ups(base))),
        **_estimated("efficiency", _of_base(one, base, one.efficiencies(base))),
        **{name: one.mean(name) for name in PARTS},
        "algorithm": one.seen.algorithm,
        "ranks_per_core": one.share,
    }


def _of_base(one: Measured, base: Measured, ratios: Sequence[float]) -> Estimate:
    """Return the estimate of `ratios`; the base's own is 1 by definition, without an interval."""
    return Estimate(1.0, None, len(ratios)) if one is base else estimate(ratios)


def _estimated(name: str, found: Estimate) -> Row:
    return {name: found.mean, f"{name}_ci95": found.half}


def _backcast(study: Study, smaller: Sequence[Seen], one: Measured, wires: Wires) -> Row:
    """Return what smaller sizes alone would have predicted: how far to trust the rest."""
    model = _model(study, smaller, wires)
    if model is None:
        return {}
    step_s = model.forecast(one.size, one.share).step_s
    return {"predicted_step_s": step_s, "prediction_error": step_s / one.median("step_s") - 1}


def _gap(size: Size) -> Row:
    return {"kind": "gap", "ranks": size.ranks, "nodes": size.nodes, "repeats": 0}


def _single(study: Study, sizes: Sequence[Measured], wires: Wires) -> Single:
    """Return the model of each repeat alone, and what the smallest size did in it."""
    whole = sorted(set.intersection(*(set(one.trials) for one in sizes)))
    found = []
    for i in whole:
        alone = [replace(one, trials={i: one.trials[i]}) for one in sizes]
        if model := _model(study, [one.seen for one in alone], wires):
            found.append((model, alone[0].mean("samples_per_s")))
    return found


def _predicted(study: Study, model: Model, sizes: Sequence[Measured], single: Single) -> list[Row]:
    """Return the rows beyond the largest size whose ranks have cores of their own."""
    apart = [one for one in sizes if one.share == 1.0 and one.size.ranks > 1]
    last = (apart or list(sizes))[-1].size
    beyond = [last.scaled(factor) for factor in BEYOND]
    if study.mode == "strong":  # each rank needs a sample
        beyond = [size for size in beyond if size.ranks <= study.batch]
    return [_forecast(study, model, size, sizes[0], single) for size in beyond]


def _forecast(study: Study, model: Model, size: Size, base: Measured, single: Single) -> Row:
    """Return the row of a size by the model of all repeats.

    Intervals are those of the models of single repeats: by how much a model is off is not in them.
    """
    samples = study.batch if study.mode == "strong" else study.batch * size.ranks
    each, found = base.size.ranks / size.ranks, model.forecast(size)
    rate = samples / found.step_s
    speed_up = rate / base.mean("samples_per_s")
    rates = [samples / one.forecast(size).step_s for one, _ in single]
    ratios = [one / did for one, (_, did) in zip(rates, single, strict=True)]
    return {
        "kind": "predicted",
        "ranks": size.ranks,
        "nodes": size.nodes,
        **_estimated("samples_per_s", _around(rate, rates)),
        **_estimated("speed_up", _around(speed_up, ratios)),
        **_estimated("efficiency", _around(speed_up * each, [one * each for one in ratios])),
        "step_s": found.step_s,
        "compute_s": found.compute_s,
        "wire_s": found.wire_s,
        "wait_s": found.wait_s,
        "other_s": found.other_s,
        "ranks_per_core": 1.0,
    }


def _around(value: float, values: Sequence[float]) -> Estimate:
    """Return `value` with the interval of `values`."""
    return replace(estimate(values), mean=value) if values else Estimate(value, None, 0)


def _serial(
    sizes: Sequence[Measured], strong: bool
) -> tuple[Estimate | None, tuple[int, ...], float | None]:
    """Return the serial fraction, fitted in each repeat, the ranks it is of, and its misfit.

    Sizes with cores of their own count.
    """
    used = [one for one in sizes if one.share == 1.0]
    ranks = tuple(one.size.ranks for one in used)
    if len(used) < 2:
        return None, ranks, None
    law: Callable[..., float] = laws.amdahl if strong else laws.gustafson
    speed_up = laws.amdahl_speed_up if strong else laws.gustafson_speed_up
    key = "step_s" if strong else "samples_per_s"
    whole = sorted(set.intersection(*(set(one.trials) for one in used)))
    seen = [[getattr(one.trials[i], key) for one in used] for i in whole]
    seen = seen or [[one.mean(key) for one in used]]
    fraction = estimate([law(ranks, one) for one in seen])
    if len(used) == 2:
        return fraction, ranks, None
    shape = [speed_up(fraction.mean, n) ** (-1 if strong else 1) for n in ranks]
    return fraction, ranks, laws.misfit(shape, [fmean(one) for one in zip(*seen, strict=True)])


def to_json(found: Result) -> dict[str, Any]:
    """Return what scaling.json holds."""
    study, model = found.study, found.model
    wire = {"alpha_s": model.alpha_s, "beta_s_per_byte": model.beta_s} if model else {}
    return {
        "machine": found.machine,
        "study": {k: v for k, v in asdict(study).items() if k != "machine"},
        "numbers": "means over repeats; of a trial the median of ten parts of its timed steps",
        "confidence": "95 %, Student's t over repeats",
        "law": {
            "name": found.law,
            "serial_fraction": found.serial and asdict(found.serial),
            "ranks": list(found.law_ranks),
            "misfit": found.law_misfit,
        },
        "model": {**wire, **asdict(model)} if model else None,
        "rows": found.rows,
    }
