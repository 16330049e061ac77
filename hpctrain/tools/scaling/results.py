"""From trials to the rows of a study: a row per size, then rows that are predicted.

Each repeat is one pass over all sizes; so speed-up and efficiency are ratios within a repeat, given
by mean and interval: a disturbance of a whole pass cancels out. With rate r in samples/s on P
ranks, and the smallest size that was measured as base,

    speed-up = r(P) / r(base)          efficiency = speed-up x base / P

in strong scaling and in weak scaling alike, where r(P) belongs to a larger problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from hpctrain.tools.scaling import statistics
from hpctrain.tools.scaling.collect import Gap, TrialResult
from hpctrain.tools.scaling.forecast import StepModel, StepTimes, fit_model
from hpctrain.tools.scaling.statistics import Estimate, estimate_mean
from hpctrain.tools.scaling.study import Study
from hpctrain.tools.scaling.trial_recipe import Size
from hpctrain.tuning.model.loggp import Wire

Row = dict[str, Any]
Outcomes = Mapping[Size, Sequence[TrialResult | Gap]]  #: of each size a trial, or a gap, per repeat
Wires = tuple[Wire | None, Wire | None]  #: in a node, between nodes
RepeatModels = Sequence[
    tuple[StepModel, float]
]  #: models of single repeats, samples/s of the smallest size
PREDICTED_FACTORS = (
    2,
    4,
    8,
)  #: predicted sizes, as multiples of the largest that the model was fitted to
TIME_COLUMNS = ("step_s", "compute_s", "wire_s", "wait_s", "other_s")


@dataclass(frozen=True)
class Result:
    """The result of a study; `rows` are dicts, as in the JSON and CSV files."""

    study: Study
    rows: list[Row]
    law: str  #: amdahl or gustafson
    serial: Estimate | None  #: fraction, None with less than two sizes
    law_ranks: tuple[int, ...]  #: sizes that the law was fitted to
    law_misfit: float | None  #: the largest share by which they miss it; two sizes meet any law
    model: StepModel | None
    machine: dict[str, Any]  #: the facts of the study and those that trials report

    @property
    def tested(self) -> bool:
        """Whether a measured size could have contradicted the model.

        A size whose ranks share cores can: it is forecast too, and not fitted to.
        """
        oversubscribed_rows = [row for row in self.of("measured") if row["ranks_per_core"] > 1]
        is_predicted = any("prediction_error" in row for row in oversubscribed_rows)
        return self.model is not None and (self.model.tested or is_predicted)

    def of(self, kind: str) -> list[Row]:
        """Return the rows that are measured, a gap, or predicted."""
        return [row for row in self.rows if row["kind"] == kind]


@dataclass(frozen=True)
class SizeTrials:
    """A size with its trials by repeat."""

    size: Size
    trials: Mapping[int, TrialResult]
    share: float

    def mean(self, name: str) -> float:
        """Return the mean over trials."""
        return fmean(getattr(trial, name) for trial in self.trials.values())

    def median(self, name: str) -> float:
        """Return the median over trials."""
        return median(getattr(trial, name) for trial in self.trials.values())

    def speed_ups(self, base: SizeTrials) -> list[float]:
        """Return the ratios to the samples/s of `base`, in each repeat that measured both."""
        common_repeats = sorted(self.trials.keys() & base.trials.keys())
        ratios = [
            self.trials[i].samples_per_s / base.trials[i].samples_per_s for i in common_repeats
        ]
        return ratios or [self.mean("samples_per_s") / base.mean("samples_per_s")]

    def efficiencies(self, base: SizeTrials) -> list[float]:
        """Return the same as shares of the ideal."""
        return [ratio * base.size.ranks / self.size.ranks for ratio in self.speed_ups(base)]

    @property
    def step_times(self) -> StepTimes:
        """The times a forecast is fitted to: medians, which one disturbed repeat does not move."""
        times = {name: self.median(name) for name in TIME_COLUMNS[:-1]}
        last_trial = self.trials[max(self.trials)]
        return StepTimes(self.size, **times, algorithm=last_trial.algorithm, share=self.share)


def group_trials(study: Study, outcomes: Outcomes) -> list[SizeTrials]:
    """Return the sizes with at least one measured trial."""
    trials = {
        size: {i: trial for i, trial in enumerate(outcomes[size]) if isinstance(trial, TrialResult)}
        for size in study.sizes
    }
    return [
        SizeTrials(size, size_trials, study.share(size))
        for size, size_trials in trials.items()
        if size_trials
    ]


def evaluate(study: Study, outcomes: Outcomes, wires: Wires = (None, None)) -> Result:
    """Return the result of the trials in `outcomes`, one per size and repeat."""
    points = group_trials(study, outcomes)
    is_strong = study.mode == "strong"
    steps = [point.step_times for point in points]
    rows = [
        _measured_row(point, points[0]) | _backcast_row(study, steps[:i], point, wires)
        for i, point in enumerate(points)
    ]
    rows += [
        {"kind": "gap", "ranks": size.ranks, "nodes": size.nodes, "repeats": 0}
        for size in study.sizes
        if size not in {point.size for point in points}
    ]
    rows.sort(key=lambda row: (row["ranks"], row["nodes"]))
    for row in rows:
        gaps = [gap for gap in outcomes[Size(row["ranks"], row["nodes"])] if isinstance(gap, Gap)]
        row |= {"repeats_missing": len(gaps), "reason": gaps[0].reason if gaps else None}
    model = _fit_model(study, steps, wires)
    predicted_rows = (
        _predicted_rows(study, model, points, _fit_repeat_models(study, points, wires))
        if model
        else []
    )
    trials = [trial for point in points for trial in point.trials.values()]
    hosts = sorted({host for trial in trials for host in trial.hosts})
    machine = study.machine | _machine_facts(trials, hosts)
    law = "amdahl" if is_strong else "gustafson"
    fit = _fit_law(points, is_strong)
    return Result(study, [*rows, *predicted_rows], law, *fit, model, machine)


def _machine_facts(trials: Sequence[TrialResult], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the facts of the machine reported by trials; a list where they report several."""
    facts: dict[str, Any] = {"hosts_seen": hosts}
    for name in dict.fromkeys(name for trial in trials for name in trial.machine):
        values = [trial.machine[name] for trial in trials if name in trial.machine]
        distinct_values = [value for i, value in enumerate(values) if value not in values[:i]]
        facts[name] = distinct_values[0] if len(distinct_values) == 1 else distinct_values
    return facts


def _fit_model(study: Study, steps: Sequence[StepTimes], wires: Wires) -> StepModel | None:
    """Return the model fitted to `steps`; None without an all-reduce of gradients over all ranks.

    `hpctrain pipeline predict` has a model of pipelines.
    """
    if study.tables.get("engine", {}).get("kind", "allreduce") != "allreduce" or study.pipe > 1:
        return None
    return fit_model(steps, study.gradient_bytes, study.mode == "strong", *wires)


def _measured_row(point: SizeTrials, base: SizeTrials) -> Row:
    rate = estimate_mean([trial.samples_per_s for trial in point.trials.values()])
    return {
        "kind": "measured",
        "ranks": point.size.ranks,
        "nodes": point.size.nodes,
        "repeats": len(point.trials),
        **_mean_columns("samples_per_s", rate),
        **_mean_columns("speed_up", _estimate_ratios(point, base, point.speed_ups(base))),
        **_mean_columns("efficiency", _estimate_ratios(point, base, point.efficiencies(base))),
        **{name: point.mean(name) for name in TIME_COLUMNS},
        "algorithm": point.step_times.algorithm,
        "ranks_per_core": point.share,
        "spread": point.median("spread"),
    }


def _estimate_ratios(point: SizeTrials, base: SizeTrials, ratios: Sequence[float]) -> Estimate:
    """Return the estimate of `ratios`; the base's own is 1 by definition, without an interval."""
    return Estimate(1.0, None, len(ratios)) if point is base else estimate_mean(ratios)


def _mean_columns(name: str, estimate: Estimate) -> Row:
    return {name: estimate.mean, f"{name}_ci95": estimate.half}


def _backcast_row(
    study: Study, smaller_steps: Sequence[StepTimes], point: SizeTrials, wires: Wires
) -> Row:
    """Return the prediction from smaller sizes alone, and its error: how far to trust the rest."""
    model = _fit_model(study, smaller_steps, wires)
    if model is None:
        return {}
    step_s = model.forecast(point.size, point.share).step_s
    return {"predicted_step_s": step_s, "prediction_error": step_s / point.median("step_s") - 1}


def _fit_repeat_models(study: Study, points: Sequence[SizeTrials], wires: Wires) -> RepeatModels:
    """Return the model of each repeat alone, with the samples/s of the smallest size in it."""
    repeats = sorted(set.intersection(*(set(point.trials) for point in points)))
    models = []
    for i in repeats:
        repeat_points = [replace(point, trials={i: point.trials[i]}) for point in points]
        if model := _fit_model(study, [point.step_times for point in repeat_points], wires):
            models.append((model, repeat_points[0].mean("samples_per_s")))
    return models


def _predicted_rows(
    study: Study, model: StepModel, points: Sequence[SizeTrials], repeat_models: RepeatModels
) -> list[Row]:
    """Return the rows beyond the largest size whose ranks have cores of their own."""
    own_core_points = [point for point in points if point.share == 1.0 and point.size.ranks > 1]
    last_size = (own_core_points or list(points))[-1].size
    predicted_sizes = [last_size.scaled(factor) for factor in PREDICTED_FACTORS]
    if study.mode == "strong":  # each rank needs a sample
        predicted_sizes = [size for size in predicted_sizes if size.ranks <= study.batch]
    return [
        _predicted_row(study, model, size, points[0], repeat_models) for size in predicted_sizes
    ]


def _predicted_row(
    study: Study, model: StepModel, size: Size, base: SizeTrials, repeat_models: RepeatModels
) -> Row:
    """Return the row of a size as predicted by the model fitted to all repeats.

    Intervals come from models fitted to single repeats: they exclude the model's own error.
    """
    samples = study.batch if study.mode == "strong" else study.batch * size.ranks
    ranks_ratio, forecast = base.size.ranks / size.ranks, model.forecast(size)
    rate = samples / forecast.step_s
    speed_up = rate / base.mean("samples_per_s")
    rates = [samples / single_model.forecast(size).step_s for single_model, _ in repeat_models]
    speed_ups = [
        rate / base_rate for rate, (_, base_rate) in zip(rates, repeat_models, strict=True)
    ]
    return {
        "kind": "predicted",
        "ranks": size.ranks,
        "nodes": size.nodes,
        **_mean_columns("samples_per_s", _recenter(rate, rates)),
        **_mean_columns("speed_up", _recenter(speed_up, speed_ups)),
        **_mean_columns(
            "efficiency",
            _recenter(speed_up * ranks_ratio, [ratio * ranks_ratio for ratio in speed_ups]),
        ),
        "step_s": forecast.step_s,
        "compute_s": forecast.compute_s,
        "wire_s": forecast.wire_s,
        "wait_s": forecast.wait_s,
        "other_s": forecast.other_s,
        "ranks_per_core": 1.0,
    }


def _recenter(mean: float, values: Sequence[float]) -> Estimate:
    """Return `mean` with the interval of `values`."""
    return replace(estimate_mean(values), mean=mean) if values else Estimate(mean, None, 0)


def _fit_law(
    points: Sequence[SizeTrials], is_strong: bool
) -> tuple[Estimate | None, tuple[int, ...], float | None]:
    """Return the serial fraction, fitted in each repeat, the ranks it is of, and its misfit.

    Sizes with cores of their own count.
    """
    fitted_points = [point for point in points if point.share == 1.0]
    ranks = tuple(point.size.ranks for point in fitted_points)
    if len(fitted_points) < 2:
        return None, ranks, None
    law: Callable[..., float] = statistics.fit_amdahl if is_strong else statistics.fit_gustafson
    speed_up = statistics.amdahl_speed_up if is_strong else statistics.gustafson_speed_up
    key = "step_s" if is_strong else "samples_per_s"
    repeats = sorted(set.intersection(*(set(point.trials) for point in fitted_points)))
    values_by_repeat = [[getattr(point.trials[i], key) for point in fitted_points] for i in repeats]
    values_by_repeat = values_by_repeat or [[point.mean(key) for point in fitted_points]]
    fraction = estimate_mean([law(ranks, repeat) for repeat in values_by_repeat])
    if len(fitted_points) == 2:
        return fraction, ranks, None
    law_values = [speed_up(fraction.mean, count) ** (-1 if is_strong else 1) for count in ranks]
    return (
        fraction,
        ranks,
        statistics.max_misfit(
            law_values, [fmean(size) for size in zip(*values_by_repeat, strict=True)]
        ),
    )
