"""The stages of a model: the layers of each, its rank, and the tensors that stages share."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from hpctrain import nn
from hpctrain.core.errors import UsageError


class SharedTensor(NamedTuple):
    """A parameter that layers of several stages use, such as a table of tokens.

    The stage of the first layer that uses it owns it: arena, optimizer and checkpoints have it
    there alone.
    """

    name: str
    owner: int  #: stage
    uses: tuple[tuple[int, int], ...]  #: (layer, stage) of each use by another stage, last first


@dataclass(frozen=True)
class StagePlan:
    """The layers `bounds[s]` to `bounds[s + 1] - 1` are stage s, computed by `placement[s]`."""

    bounds: tuple[int, ...]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in the order of the forward pass."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of `layer`."""
        return bisect_right(self.bounds, layer) - 1

    def owned_names(self, model: nn.Model, rank: int) -> list[str]:
        """Return the parameters that `rank` keeps in its arena, in the model's order."""
        stages = self.stages_of(rank)
        return [name for name, uses in model.uses.items() if self.stage_of_layer(uses[0]) in stages]

    def shared_tensors(self, model: nn.Model) -> Iterator[SharedTensor]:
        """Yield the parameters that several stages use, in the model's order."""
        for name, layers in model.uses.items():
            owner = self.stage_of_layer(layers[0])
            stages = [(layer, self.stage_of_layer(layer)) for layer in reversed(layers)]
            if uses := tuple((layer, stage) for layer, stage in stages if stage != owner):
                yield SharedTensor(name, owner, uses)


def plan_stages(layer_counts: Sequence[int], placement: tuple[int, ...]) -> StagePlan:
    """Return the plan of stages with `layer_counts` layers each."""
    return StagePlan((0, *accumulate(layer_counts)), placement)


def require_splittable(model: nn.Model, stages: int) -> None:
    """Raise UsageError for a model that cannot be cut into `stages` stages."""
    layers = len(model.layers)
    if stages > layers:
        raise UsageError(
            f"[mesh] pipe: expected at most {layers} stages, one per layer of the model, seen "
            f"{stages}; start fewer ranks along pipe"
        )
    if model.buffers:
        raise UsageError(
            "[mesh] pipe: the model normalizes over the batch (BatchNorm), but a pipeline computes "
            "it in micro-batches: expected a model without BatchNorm; use LayerNorm"
        )
