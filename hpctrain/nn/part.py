"""Consecutive layers of a model: a stage of a pipeline, or the whole model on one rank.

    Part(model, 0, k)   x -> layers 0 .. k - 1 -> y     Part(model, k, n)   y -> layers k .. n - 1
                       dx <-                  <- dy                       dy <-

Both give the bytes of the whole model: random numbers depend on a layer's number in the model, and
`GradientSums` adds the gradients of micro-batches and of shared parameters in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.core.xp import Array
from hpctrain.nn.gradient_sums import GradientSums
from hpctrain.nn.layer import Key, Later, Layer, run_now, takes_later

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
        used = Counter(full for names in model.layer_names[start:stop] for full in names.values())
        declared = [
            full
            for layer, names in list(zip(model.layers, model.layer_names, strict=True))[start:stop]
            for own, full in names.items()
            if full == f"{layer}.{own}"
        ]
        #: Parameters and buffers that layers of this part declare, in the model's order
        self.parameters = {n: p for n, p in model.parameters.items() if n in declared}
        self.buffers = {n: p for n, p in model.buffers.items() if n in declared}
        #: Parameters that layers before this part declare
        self.shared = {n: p for n, p in model.parameters.items() if n in used and n not in declared}
        #: Parameters that layers of other parts use too
        self.tied = tuple(n for n in model.parameters if 0 < used[n] < model.use_counts[n])
        #: Number of uses of each parameter by layers of this part
        self.use_counts = {n: count for n, count in used.items() if n in model.parameters}
        layers, seen = [], set(self.tied)
        for i, layer in reversed(list(enumerate(model.layers.values()))[start:stop]):
            names = model.layer_names[i]
            trained = {o: n for o, n in reversed(names.items()) if n in model.parameters}
            separate = tuple(_repeated(trained, seen))
            layers.append(PartLayer(i, layer, takes_later(type(layer)), names, trained, separate))
        self._layers = tuple(reversed(layers))
        self._lowest = next((i for i, layer in enumerate(self._layers) if layer.names),
                            len(self._layers))  # fmt: skip

    def forward(
        self, params: Mapping[str, Array], x: Any, key: Key | None
    ) -> tuple[Any, list[Any]]:
        """Return the output of the last layer and the tape for `backward`, empty without `key`.

        `params` holds an array for each parameter and buffer that the part uses. Buffers are
        written in training. `key.on_need(name)` is called before a layer reads an array.
        """
        tape: list[Any] = []
        for layer in self._layers:
            if key is not None:
                key = key._replace(layer=layer.number)
                if key.on_need is not None:
                    for name in layer.names.values():
                        key.on_need(name)
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
        lowest = 0 if want_dx else self._lowest
        micro_batch, lazy = sums.begin(), later is not run_now
        dx: Array | None = dy
        for i in range(len(self._layers) - 1, lowest - 1, -1):
            layer = self._layers[i]
            p = {own: params[name] for own, name in layer.names.items()}
            g = sums.arrays_for(layer, p, micro_batch, lazy) if layer.trained else {}
            extra = (later,) if layer.takes_later else ()
            dx = layer.layer.backward(p, g, tape.pop(), dx, want_dx or i > lowest, *extra)
            if layer.trained:
                later(partial(sums.add, layer, g, micro_batch))
        return dx if want_dx else None


def _repeated(names: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    """Yield the own names whose full names are in `seen`; add all to `seen`."""
    for own, name in names.items():
        if name in seen:
            yield own
        seen.add(name)
