"""The stages of a model: each stage's layers, its rank, and the tensors that stages share.

    layers   embedding  block1  block2 | block3  block4 | norm  out
    stage    0                         | 1              | 2            bounds 0, 3, 5, 7

A stage begins with a layer that has parameters of its own, so that each rank has parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.nn.part import Part
from hpctrain.parallel.pipeline import balance
from hpctrain.parallel.pipeline.layer_times import LayerSeconds, stage_costs
from hpctrain.parallel.schedules.placement import Placed, Placement
from hpctrain.parallel.timing.clock import StageCosts


class SharedTensor(NamedTuple):
    """A parameter that layers of several stages use, such as a table of tokens.

    The stage of the first layer that uses it owns it: arena, optimizer and checkpoints have it
    there alone.
    """

    name: str
    owner: int  #: stage
    uses: tuple[tuple[int, int], ...]  #: (layer, stage) of each use by another stage, last first


@dataclass(frozen=True)
class StagePlan(Placed):
    """The layers `bounds[s]` to `bounds[s + 1] - 1` are stage s, computed by `placement[s]`."""

    bounds: tuple[int, ...]
    placement: Placement
    layer_seconds: tuple[LayerSeconds, ...] = ()  #: for layer_times.SAMPLES; empty: not measured

    @property
    def layer_counts(self) -> list[int]:
        """The number of layers of each stage."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @property
    def costs(self) -> StageCosts:
        """The costs of the stages for the clock: as measured, else of equal stages."""
        if self.layer_seconds:
            return stage_costs(self.layer_seconds, self.bounds)
        return StageCosts(*((1.0,) * self.stages for _ in range(3)))

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which knows the loss."""
        return self.placement[-1]

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of `layer`."""
        return bisect_right(self.bounds, layer) - 1

    def part(self, model: nn.Model, stage: int) -> Part:
        """Return the layers of `stage`."""
        return Part(model, self.bounds[stage], self.bounds[stage + 1])

    def boundary_shape(self, model: nn.Model, boundary: int) -> tuple[int, ...]:
        """Return the shape of a sample between the stages `boundary` and `boundary` + 1."""
        return model.shapes[self.bounds[boundary + 1]]

    def owned_names(self, model: nn.Model, rank: int) -> list[str]:
        """Return the parameters that `rank` keeps in its arena, in the model's order."""
        stages = self.stages_of(rank)
        return [n for n, layers in model.uses.items() if self.stage_of_layer(layers[0]) in stages]

    def shared_tensors(self, model: nn.Model) -> Iterator[SharedTensor]:
        """Yield the parameters that several stages use, in the model's order."""
        for name, layers in model.uses.items():
            owner = self.stage_of_layer(layers[0])
            stages = [(layer, self.stage_of_layer(layer)) for layer in reversed(layers)]
            if uses := tuple((layer, stage) for layer, stage in stages if stage != owner):
                yield SharedTensor(name, owner, uses)

    def copied_elements(self, model: nn.Model, rank: int) -> int:
        """Return the size of the tensors that `rank` uses and another rank owns."""
        own_stages = self.stages_of(rank)
        return sum(
            prod(model.parameters[name].shape)
            for name, owner, uses in self.shared_tensors(model)
            if owner not in own_stages and any(stage in own_stages for _, stage in uses)
        )


def plan_by_hand(
    model: nn.Model, layer_counts: Sequence[int], placement: tuple[int, ...]
) -> StagePlan:
    """Return the plan of stages of `layer_counts` layers; raise UsageError if they do not fit."""
    counts = balance.check_cut(layer_counts, len(model.layers), len(placement))
    bounds = (0, *accumulate(counts))
    own_layers = {layers[0] for layers in model.uses.values()}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        if not own_layers & {*range(start, stop)}:
            names = ", ".join(list(model.layers)[start:stop])
            raise UsageError(
                f"[pipeline] balance: expected a layer with parameters of its own in each stage, "
                f"seen {names} in stage {stage}"
            )
    return StagePlan(bounds, placement)


def plan_by_times(
    model: nn.Model, layers: Sequence[LayerSeconds], placement: tuple[int, ...]
) -> StagePlan:
    """Return the plan with the least time of the slowest stage."""
    return replace(
        plan_by_costs(model, [*map(sum, layers)], placement), layer_seconds=tuple(layers)
    )


def plan_by_costs(model: nn.Model, costs: Sequence[float], placement: tuple[int, ...]) -> StagePlan:
    """Return the plan with the least cost of the most expensive stage, from the costs of layers."""
    starts = _possible_starts(model)
    bounds = [*starts, len(costs)]
    groups = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    sizes = [float(prod(model.shapes[start])) for start in starts[1:]]
    counts = balance.cut(groups, len(placement), sizes)
    return StagePlan(tuple(bounds[i] for i in (0, *accumulate(counts))), placement)


def parameter_counts(model: nn.Model) -> list[float]:
    """Return the number of parameters that each layer declares."""
    counts = [0.0] * len(model.layers)
    for name, layers in model.uses.items():
        counts[layers[0]] += prod(model.parameters[name].shape)
    return counts


def require_splittable(model: nn.Model) -> None:
    """Raise UsageError for a model that a pipeline cannot compute."""
    if model.normalizes_batch:
        raise UsageError(
            "[mesh] pipe: the model normalizes over the batch (BatchNorm), but a pipeline computes "
            "it in micro-batches: expected a model without BatchNorm; use LayerNorm"
        )


def require_stages(model: nn.Model, stages: int) -> None:
    """Raise UsageError if the model has fewer layers with parameters than `stages`."""
    max_stages = len(_possible_starts(model))
    if stages > max_stages:
        raise UsageError(
            f"[mesh] pipe: expected at most {max_stages} stages, one per layer with parameters, "
            f"seen {stages}; start fewer ranks along pipe, or take fewer stages per rank"
        )


def _possible_starts(model: nn.Model) -> list[int]:
    """Return the layers at which a stage may begin: the first, and layers with parameters."""
    declaring_layers = sorted({layers[0] for layers in model.uses.values()})
    return [0, *declaring_layers[1:]]
