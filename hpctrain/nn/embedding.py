"""Embedding of tokens as vectors, and the output layer that may share its table.

    ids (n, length) --Embedding--> (n, length, width)  ...  --Unembedding--> (n, length, entries)
                         ^------------- the same table -------------^

Press and Wolf (2017), "Using the output embedding to improve language models".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, on_device
from hpctrain.nn.layer import (
    Key,
    Later,
    Parameter,
    Shape,
    normal,
    require_at_least,
    rows_of,
    run_now,
    sum_rows,
    write_affine_gradients,
)

INIT_STD = 0.02  #: standard deviation at the start, as in GPT-2 (Radford et al., 2019)
MAX_ONE_HOT_BYTES = 64 << 20  #: of a one-hot matrix; see `_sum_rows_by_matmul`


@dataclass(frozen=True)
class Embedding:
    """Row x of `table` (entries, width) for each number x in 0 .. entries - 1.

    Samples are whole numbers (length,) of any dtype; outputs are (length, width).
    """

    entries: int
    width: int

    def __post_init__(self) -> None:
        require_at_least(self, entries=(self.entries, 1), width=(self.width, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 1:
            raise UsageError(f"expected numbers (length,), seen {shape}")
        return (*shape, self.width)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {"table": Parameter((self.entries, self.width), normal(INIT_STD))}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        indices = x.astype("int64")
        if not on_device(x):  # else the model has checked them on the host
            self.check(indices)
        return p["table"][indices], indices

    def check(self, x: np.ndarray) -> None:
        """Raise UsageError for samples on the host that are not indices of the table."""
        if x.size and not 0 <= x.min() <= x.max() < self.entries:
            raise UsageError(
                f"Embedding: expected numbers in 0 .. {self.entries - 1}, "
                f"seen {x.min()} .. {x.max()}"
            )

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Array,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        later(partial(_write_table_gradient, g, saved.reshape(-1), rows_of(dy)))
        return None  # numbers have no gradient


@dataclass(frozen=True)
class Positions:
    """y = x + table: a trained vector (width,) for each position; samples are (length, width)."""

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2:
            raise UsageError(f"expected vectors at positions (length, width), seen {shape}")
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        return {"table": Parameter(shape, normal(INIT_STD))}

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, None]:
        return x + p["table"], None

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: None,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        later(partial(_write_position_gradients, g, dy))
        return dy


@dataclass(frozen=True)
class Unembedding:
    """y = x tableᵀ with the table of layer `embedding`: (..., width) -> (..., entries)."""

    embedding: str  #: name of an earlier Embedding
    entries: int

    def output_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise UsageError("expected samples (..., width), seen numbers")
        return (*shape[:-1], self.entries)

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        table_shape = (self.entries, shape[-1])
        return {
            "table": Parameter(table_shape, normal(INIT_STD), shared_with=f"{self.embedding}.table")
        }

    def forward(self, p: Mapping[str, Array], x: Array, key: Key | None) -> tuple[Array, Array]:
        flat = rows_of(x)
        return (flat @ p["table"].T).reshape(*x.shape[:-1], self.entries), x

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: Array,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        flat = rows_of(dy)
        # The table is the transpose of a weight, so x and dy change places in its gradient.
        later(partial(write_affine_gradients, g, flat, rows_of(saved), "table"))
        return (flat @ p["table"]).reshape(saved.shape) if want_dx else None


def _write_position_gradients(g: Mapping[str, Array], dy: Array) -> None:
    table = g["table"]
    sum_rows(dy.reshape(len(dy), table.size), out=table.reshape(-1))


def _write_table_gradient(g: Mapping[str, Array], rows: Array, dy: Array) -> None:
    """Scatter-add the rows of `dy` into the table's gradient: row j to index `rows[j]`."""
    table = g["table"]
    if on_device(dy):
        _sum_rows_by_matmul(table, rows, dy)
        return
    # Sorting makes the rows of one entry adjacent, and fixes the order in which they are added.
    xp, sorted_order = namespace(dy), rows.argsort(kind="stable")
    rows = rows[sorted_order]
    table[...] = 0
    if len(rows):
        starts = xp.flatnonzero(xp.concatenate([rows[:1] == rows[:1], rows[1:] != rows[:-1]]))
        table[rows[starts]] = xp.add.reduceat(dy[sorted_order], starts, axis=0)


def _sum_rows_by_matmul(table: Array, rows: Array, dy: Array) -> None:
    """Write into row i of `table` the sum of the rows of `dy` (n, width) where `rows` (n,) is i.

    The sum is a product with a one-hot matrix: fast on a device, and reproducible.
    """
    xp = namespace(dy)
    entries_per_product = max(1, MAX_ONE_HOT_BYTES // max(1, dy.itemsize * len(dy)))
    for first_entry in range(0, len(table), entries_per_product):
        table_part = table[first_entry : first_entry + entries_per_product]
        entries = xp.arange(first_entry, first_entry + len(table_part))[:, None]
        xp.matmul((entries == rows).astype(dy.dtype), dy, out=table_part)
