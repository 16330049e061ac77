"""A transformer that reads bytes and predicts at each place the next byte.

    bytes - table - places - [norm - attention (+) norm - linear - GELU - linear (+)] x layers
          - norm - the same table, transposed

Norms stand before what they norm for, so the sums run through untouched (GPT-2: Radford et al.,
2019, whose start values these are too).
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated

import pydantic

from hpctrain.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import GELU
from hpctrain.nn.attention import CausalAttention
from hpctrain.nn.chain import Chain, Recompute, Residual
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.embedding import SPREAD, Embedding, Positions, Unembedding
from hpctrain.nn.layer import MOST_LAYERS, Layer, Shape
from hpctrain.nn.layer_norm import LayerNorm
from hpctrain.nn.linear import Linear
from hpctrain.nn.model import Model

BYTES = 256
Count = Annotated[int, pydantic.Field(gt=0)]
Rate = Annotated[float, pydantic.Field(ge=0, lt=1)]


@options
class TransformerOptions:
    """`layers` blocks of `width` with `heads`; `length` bytes are read at once, as the data says.

    With `recompute` the blocks save their input alone, and compute the rest again in backward.
    """

    layers: Annotated[int, pydantic.Field(gt=0, le=MOST_LAYERS)]
    width: Count
    heads: Count
    length: Count | None = None
    dropout: Rate = 0.0
    recompute: bool = False

    def build(self, input_shape: Shape | None, classes: int | None) -> Model:
        """Return the model for texts of shape (length,), whose targets are the next bytes.

        Raises UsageError if the data has no such shape or another length, or more than 256 labels.
        """
        shape = (self.length or 0,) if input_shape is None else tuple(input_shape)
        if len(shape) != 1 or not shape[0] or self.length not in (None, shape[0]):
            raise UsageError(
                f"[model] transformer: expected texts of shape ({self.length or 'length'},), seen "
                f"{shape}; give [model] and [data] the same length"
            )
        if classes is not None and classes > BYTES:
            raise UsageError(f"[model] transformer: expected labels below 256, seen {classes}")
        return Model(self._layers(), shape)

    def _layers(self) -> dict[str, Layer]:
        layers: dict[str, Layer] = {
            "embedding": Embedding(BYTES, self.width),
            "positions": Positions(),
            "dropout": Dropout(self.dropout),
        }
        for i in range(1, self.layers + 1):
            layers[f"block{i}"] = Recompute(self._block()) if self.recompute else self._block()
        return layers | {"norm": LayerNorm(), "out": Unembedding("embedding", BYTES)}

    def _block(self) -> Layer:
        # What each block adds is small at the start, so that the sum of all does not grow.
        spread = SPREAD / sqrt(2 * self.layers)
        attention = CausalAttention(self.heads, spread)
        wide = Linear(4 * self.width, places=True, spread=SPREAD)
        narrow = Linear(self.width, places=True, spread=spread)
        drop = Dropout(self.dropout)
        mix: dict[str, Layer] = {"norm1": LayerNorm(), "attention": attention, "dropout1": drop}
        mlp: dict[str, Layer] = {
            "norm2": LayerNorm(),
            "wide": wide,
            "gelu": GELU(),
            "narrow": narrow,
            "dropout2": drop,
        }
        return Chain({"mix": Residual(mix), "each": Residual(mlp)})
