r"""Consecutive layers of a model: a stage of a pipeline, or the whole model on one rank.

    Part(model, 0, k)   x -> layers 0 .. k - 1 -> y     Part(model, k, n)   y -> layers k .. n - 1
                       dx <-                  <- dy                       dy <-

Both give the bytes of the whole model: random numbers depend on a layer's number in the model, and
`GradientSums` adds the gradients of micro-batches and of shared parameters in one order.

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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.errors import HpctrainError
from hpctrain.core.xp import Array, namespace
from hpctrain.nn.layer import Key, Later, Layer, LazyArrays, run_now, takes_later

if TYPE_CHECKING:
    from hpctrain.nn.model import Model


class PartLayer(NamedTuple):
    """A layer of a part, with its own and the full names of its parameters and buffers."""

    number: int  #: of the layer in the model, from 0
    layer: Layer
    takes_later: bool
    names: dict[str, str]  #: of parameters and buffers
    trained: dict[str, str]  #: of parameters, in reverse order
    #: Own names of parameters whose contribution has a sum of its own, outside of the gradient's
    #: plane: a later layer, or a layer in another part, contributes to the same gradient.
    separate: tuple[str, ...]


class Part:
    """The layers `start` .. `stop - 1` of a model."""

    def __init__(self, model: Model, start: int, stop: int):
        self.start, self.stop = start, stop
        declaring = {name: layers[0] for name, layers in model.uses.items()}
        uses_here = Counter(
            full for names in model.layer_names[start:stop] for full in names.values()
        )
        #: Parameters and buffers that layers of this part declare, in the model's order
        self.parameters, self.buffers = (
            {n: p for n, p in slots.items() if start <= declaring[n] < stop}
            for slots in (model.parameters, model.buffers)
        )
        used = {n: p for n, p in model.parameters.items() if n in uses_here}
        #: Parameters that layers before this part declare
        self.shared = {n: p for n, p in used.items() if n not in self.parameters}
        #: Parameters that layers of other parts use too
        self.tied = tuple(n for n in used if uses_here[n] < len(model.uses[n]))
        #: Number of uses of each parameter by layers of this part
        self.use_counts = {n: count for n, count in uses_here.items() if n in used}
        layers, seen_names = [], set(self.tied)
        for i, layer in reversed(list(enumerate(model.layers.values()))[start:stop]):
            names = model.layer_names[i]
            trained = {o: n for o, n in reversed(names.items()) if n in model.parameters}
            separate = tuple(_repeated_names(trained, seen_names))
            layers.append(PartLayer(i, layer, takes_later(type(layer)), names, trained, separate))
        self._layers = tuple(reversed(layers))
        self._lowest_layer = next((i for i, layer in enumerate(self._layers) if layer.names),
                            len(self._layers))  # fmt: skip

    def forward(
        self, params: Mapping[str, Array], x: Any, key: Key | None
    ) -> tuple[Any, list[Any]]:
        """Return the output of the last layer and the tape for `backward`, empty without `key`.

        `params` holds an array for each parameter and buffer that the part uses. Buffers are
        written in training.
        """
        tape: list[Any] = []
        for layer in self._layers:
            if key is not None:
                key = key._replace(layer=layer.number)
            p = {own: params[name] for own, name in layer.names.items()}
            x, saved = layer.layer.forward(p, x, key)
            if key is not None:
                tape.append(saved)
        return x, tape

    def backward(
        self,
        params: Mapping[str, Array],
        sums: GradientSums,
        tape: list[Any],
        dy: Array,
        later: Later = run_now,
        want_dx: bool | None = None,
    ) -> Array | None:
        """Add the gradient of the next micro-batch to `sums`; return dL/dx, last layer first.

        `dy` is dL/dy for the output of the forward pass that returned `tape`, which is emptied.
        Micro-batches are passed in order. `later` takes the products that compute the gradients of
        parameters and add them to `sums`; they must run in the order in which they were passed, the
        returned array does not need them. Without `want_dx`, by default if the part begins with the
        model's first layer, layers before the first one with parameters are left out, and None is
        returned.
        """
        want_dx = self.start > 0 if want_dx is None else want_dx
        lowest_layer = 0 if want_dx else self._lowest_layer
        micro_batch, lazy = sums.begin(), later is not run_now
        dx: Array | None = dy
        for i in range(len(self._layers) - 1, lowest_layer - 1, -1):
            layer = self._layers[i]
            p = {own: params[name] for own, name in layer.names.items()}
            g = sums.arrays_for(layer, p, micro_batch, lazy) if layer.trained else {}
            extra = (later,) if layer.takes_later else ()
            dx = layer.layer.backward(p, g, tape.pop(), dx, want_dx or i > lowest_layer, *extra)
            if layer.trained:
                later(partial(sums.add, layer, g, micro_batch))
        return dx if want_dx else None


def _repeated_names(names: Mapping[str, str], seen_names: set[str]) -> Iterator[str]:
    """Yield the own names whose full names are in `seen_names`; add all to `seen_names`."""
    for own, name in names.items():
        if name in seen_names:
            yield own
        seen_names.add(name)


class GradientSums:
    """The gradient of a part in one step; `Part.backward` adds each micro-batch."""

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
        self._micro_batches, self._begun_count = micro_batches, 0
        self._part, self._uses_left = part, dict(part.use_counts)
        self._added_counts = [0] * (part.stop - part.start)  #: micro-batches of each layer
        self._totals: dict[int, dict[str, Array]] = {}  #: by layer, then by its own names
        #: Totals that are not summed in `views`, with their layers, last layer first
        self._separate_totals: dict[str, list[tuple[int, Array]]] = {}

    def begin(self) -> int:
        """Return the number of the next micro-batch."""
        if self._begun_count == self._micro_batches:
            raise HpctrainError(
                f"a gradient of {self._micro_batches} micro-batches: expected no further backward"
            )
        self._begun_count += 1
        return self._begun_count - 1

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
            self._separate_totals.setdefault(layer.trained[own], []).append(
                (layer.number, totals[own])
            )
        self._totals[layer.number] = totals
        return totals

    def add(self, layer: PartLayer, g: Mapping[str, Array], micro_batch: int) -> None:
        """Add what the layer has written into `g` to its totals; each micro-batch in turn."""
        self._count_micro_batch(layer.number, micro_batch)
        if micro_batch:
            totals = self._totals[layer.number]
            for own in totals:
                totals[own] += g[own]
        if micro_batch + 1 == self._micro_batches:
            for name in layer.trained.values():
                self._uses_left[name] -= 1
                if not self._uses_left[name] and name not in self._part.tied:
                    self._finish_gradient(name)

    def check_complete(self, names: Iterable[str] | None = None) -> None:
        """Raise HpctrainError if products of a parameter, by default of any, have not run."""
        names = self._uses_left if names is None else names
        waiting_names = [name for name in names if self._uses_left[name]]
        if waiting_names:
            raise HpctrainError(
                f"the gradient of '{waiting_names[0]}': expected {self._micro_batches} "
                "micro-batches of each layer, seen "
                f"{dict(enumerate(self._added_counts, self._part.start))} by layer; run all "
                "products that backward has passed to `later`"
            )

    def totals(self) -> list[tuple[int, str, Array]]:
        """Return (layer, name, total) of this part for parameters that other parts use too."""
        self.check_complete(self._part.tied)
        return [(i, name, x) for name in self._part.tied for i, x in self._separate_totals[name]]

    def finish(self, name: str, foreign: Iterable[tuple[int, Array]]) -> None:
        """Write the gradient of a tied parameter, with the totals of layers of other parts."""
        self.check_complete([name])
        totals = [*self._separate_totals[name], *foreign]
        totals.sort(key=lambda total: total[0], reverse=True)
        self._views[name][...] = totals[0][1]
        self._separate_totals[name] = totals[1:]
        self._finish_gradient(name)

    def _count_micro_batch(self, layer: int, micro_batch: int) -> None:
        i = layer - self._part.start
        if self._added_counts[i] != micro_batch:
            raise HpctrainError(
                f"the gradient of layer {layer}: expected micro-batch "
                f"{self._added_counts[i]} next, seen {micro_batch}; run products once, in the "
                "order in which backward passed them"
            )
        self._added_counts[i] += 1

    def _finish_gradient(self, name: str) -> None:
        """Add the other totals of a parameter to the first one, which is in its view."""
        for _, total in self._separate_totals.get(name, ()):
            self._views[name][...] += total
        self._on_ready(name)


def _empty_like(x: Array) -> Array:
    return namespace(x).empty_like(x)
