"""The gradient of a step: the sum over micro-batches, and over the layers that share a parameter.

Floating-point addition is not associative, so the order is fixed. Each layer's contribution to a
parameter is summed over the micro-batches 0, 1, ... by itself; the totals of layers that share a
parameter are then added, last layer first:

    out.table -> u0 + u1 + ...  \
                                 (+)  -> gradient of embedding.table
    embedding -> e0 + e1 + ...  /

So the stages of a pipeline, where `out` and `embedding` may lie on two ranks, get the same bytes as
on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hpctrain.core.errors import HpctrainError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.layer import LazyArrays

if TYPE_CHECKING:
    from hpctrain.nn.part import Part, PartLayer


class GradientSums:
    """The gradient of one step of a part, which `Part.backward` adds to."""

    def __init__(
        self,
        part: Part,
        views: Mapping[str, Array],
        micro_batches: int,
        on_ready: Callable[[str], None],
    ):
        """Sum `micro_batches` gradients in `views`, contiguous arrays that are overwritten.

        `views` has an array for each of the part's own parameters. `on_ready(name)` is called once
        per parameter, directly after the last write of its gradient. Only `finish` writes the
        gradient of a parameter in `part.tied`.
        """
        self._views, self._on_ready = views, on_ready
        self._micro_batches, self._begun = micro_batches, 0
        self._part, self._uses_left = part, dict(part.use_counts)
        self._added = [0] * (part.stop - part.start)  #: micro-batches of each layer
        self._totals: dict[int, dict[str, Array]] = {}  #: by layer, then by its own names
        #: Totals that are not summed in `views`, with their layers, last layer first
        self._separate: dict[str, list[tuple[int, Array]]] = {}

    def begin(self) -> int:
        """Return the number of the next micro-batch."""
        if self._begun == self._micro_batches:
            raise HpctrainError(
                f"a gradient of {self._micro_batches} micro-batches: expected no further backward"
            )
        self._begun += 1
        return self._begun - 1

    def arrays_for(
        self, layer: PartLayer, p: Mapping[str, Array], micro_batch: int, lazy: bool
    ) -> Mapping[str, Array]:
        """Return the arrays that the layer overwrites with its gradients of `micro_batch`.

        With `lazy` they are created when a product needs them.
        """
        # The first contribution is written where the total will be, the others elsewhere.
        if micro_batch:
            totals = self._totals[layer.number]
            if lazy:
                return LazyArrays({own: partial(_empty_like, x) for own, x in totals.items()})
            return {own: _empty_like(total) for own, total in totals.items()}
        totals = {
            own: self._views[name]
            for own, name in layer.trained.items()
            if own not in layer.separate
        }
        for own in layer.separate:
            totals[own] = _empty_like(p[own])
            self._separate.setdefault(layer.trained[own], []).append((layer.number, totals[own]))
        self._totals[layer.number] = totals
        return totals

    def add(self, layer: PartLayer, g: Mapping[str, Array], micro_batch: int) -> None:
        """Add what the layer has written into `g` to its totals; each micro-batch in turn."""
        self._count(layer.number, micro_batch)
        if micro_batch:
            totals = self._totals[layer.number]
            for own in totals:
                totals[own] += g[own]
        if micro_batch + 1 == self._micro_batches:
            for name in layer.trained.values():
                self._uses_left[name] -= 1
                if not self._uses_left[name] and name not in self._part.tied:
                    self._finish(name)

    def check_complete(self, names: Iterable[str] | None = None) -> None:
        """Raise HpctrainError if products of a parameter, by default of any, have not run."""
        names = self._uses_left if names is None else names
        waiting = [name for name in names if self._uses_left[name]]
        if waiting:
            raise HpctrainError(
                f"the gradient of '{waiting[0]}': expected {self._micro_batches} micro-batches of "
                f"each layer, seen {dict(enumerate(self._added, self._part.start))} by layer; "
                "run all products that backward has passed to `later`"
            )

    def totals(self) -> list[tuple[int, str, Array]]:
        """Return (layer, name, total) of this part for parameters that other parts use too."""
        self.check_complete(self._part.tied)
        return [(i, name, x) for name in self._part.tied for i, x in self._separate[name]]

    def finish(self, name: str, foreign: Iterable[tuple[int, Array]]) -> None:
        """Write the gradient of a tied parameter, with the totals of layers of other parts."""
        self.check_complete([name])
        totals = [*self._separate[name], *foreign]
        totals.sort(key=lambda total: total[0], reverse=True)
        self._views[name][...] = totals[0][1]
        self._separate[name] = totals[1:]
        self._finish(name)

    def _count(self, layer: int, micro_batch: int) -> None:
        i = layer - self._part.start
        if self._added[i] != micro_batch:
            raise HpctrainError(
                f"the gradient of layer {layer}: expected micro-batch {self._added[i]} next, seen "
                f"{micro_batch}; run products once, in the order in which backward passed them"
            )
        self._added[i] += 1

    def _finish(self, name: str) -> None:
        """Add the other totals of a parameter to the first one, which is in its view."""
        for _, total in self._separate.get(name, ()):
            self._views[name][...] += total
        self._on_ready(name)


def _empty_like(x: Array) -> Array:
    return namespace(x).empty_like(x)
