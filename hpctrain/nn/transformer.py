"""A transformer that reads bytes and predicts the next byte at each position.

    bytes - table - places - [norm - attention (+) norm - linear - GELU - linear (+)] x layers
          - norm - the same table, transposed

Each norm stands at the start of its branch, so the residual path has no norms (pre-norm, as in
GPT-2: Radford et al., 2019). GPT-2 has the same initial values.
"""

from __future__ import annotations

from math import sqrt
from typing import Annotated

import pydantic

from hpctrain.core.config import options
from hpctrain.core.errors import UsageError
from hpctrain.nn.activations import GELU
from hpctrain.nn.attention import CausalAttention
from hpctrain.nn.chain import Chain, Recompute, Residual
from hpctrain.nn.dropout import Dropout
from hpctrain.nn.embedding import INIT_STD, Embedding, Positions, Unembedding
from hpctrain.nn.layer import MAX_LAYERS, Layer, Shape
from hpctrain.nn.layer_norm import LayerNorm
from hpctrain.nn.linear import Linear
from hpctrain.nn.model import Model

BYTE_VALUES = 256
Count = Annotated[int, pydantic.Field(gt=0)]
Rate = Annotated[float, pydantic.Field(ge=0, lt=1)]


@options
class TransformerOptions:
    """`layers` blocks of `width` with `heads`; `length`, the bytes of a sample, is the data's.

    With `recompute` each block saves only its input, and computes its other values again in
    backward.
    """

    layers: Annotated[int, pydantic.Field(gt=0, le=MAX_LAYERS)]
    width: Count
    heads: Count
    length: Count | None = None
    dropout: Rate = 0.0
    recompute: bool = False

    def build(self, input_shape: Shape | None, outputs: int | None) -> Model:
        """Return the model for texts of shape (length,), whose targets are the next bytes.

        Raises UsageError if samples have another shape or length, or more than 256 labels.
        """
        shape = (self.length or 0,) if input_shape is None else tuple(input_shape)
        if len(shape) != 1 or not shape[0] or self.length not in (None, shape[0]):
            raise UsageError(
                f"[model] transformer: expected texts of shape ({self.length or 'length'},), seen "
                f"{shape}; give [model] and [data] the same length"
            )
        if outputs is not None and outputs > BYTE_VALUES:
            raise UsageError(f"[model] transformer: expected labels below 256, seen {outputs}")
        return Model(self._layers(), shape)

    def _layers(self) -> dict[str, Layer]:
        layers: dict[str, Layer] = {
            "embedding": Embedding(BYTE_VALUES, self.width),
            "positions": Positions(),
            "dropout": Dropout(self.dropout),
        }
        for i in range(1, self.layers + 1):
            layers[f"block{i}"] = Recompute(self._block()) if self.recompute else self._block()
        return layers | {"norm": LayerNorm(), "out": Unembedding("embedding", BYTE_VALUES)}

    def _block(self) -> Layer:
        # The outputs of the branches are small at the start, so that their sum does not grow with
        # the number of layers.
        init_std = INIT_STD / sqrt(2 * self.layers)
        attention = CausalAttention(self.heads, init_std)
        expand = Linear(4 * self.width, per_position=True, init_std=INIT_STD)
        contract = Linear(self.width, per_position=True, init_std=init_std)
        dropout = Dropout(self.dropout)
        attention_branch: dict[str, Layer] = {
            "norm1": LayerNorm(),
            "attention": attention,
            "dropout1": dropout,
        }
        mlp_branch: dict[str, Layer] = {
            "norm2": LayerNorm(),
            "wide": expand,
            "gelu": GELU(),
            "narrow": contract,
            "dropout2": dropout,
        }
        return Chain({"mix": Residual(attention_branch), "each": Residual(mlp_branch)})
