"""Blocks of rows that a library decodes as a whole, such as chunks: the last ones are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

CACHE_BYTES = 24 << 20  #: of decoded blocks that one open file keeps


class Blocks:
    """Rows of a file that are decoded in blocks, such as chunks: the last blocks are kept.

    `number_of(rows)` returns the numbers of blocks, and `first_of(number)` the first row of one.
    `load(number)` decodes a block, `size_bytes(block)` is its size, and `take(block, rows, first)`
    returns the values of `rows` of the file, where the block begins with row `first`.
    """

    def __init__(
        self,
        number_of: Callable[[np.ndarray], np.ndarray],
        first_of: Callable[[int], int],
        load: Callable[[int], Any],
        take: Callable[[Any, np.ndarray, int], np.ndarray],
        size_bytes: Callable[[Any], int],
    ) -> None:
        self._number_of, self._first_of = number_of, first_of
        self._load, self._take, self._size_bytes = load, take, size_bytes
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the values of `rows`, increasing."""
        numbers = self._number_of(rows)
        pieces = []
        for number in np.unique(numbers).tolist() or [0]:
            first = self._first_of(number)
            pieces.append(self._take(self._block(number), rows[numbers == number], first))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _block(self, number: int) -> Any:
        if number not in self._kept:
            block = self._load(number)
            self._kept[number] = block
            while len(self._kept) > 1 and self._kept_bytes() > CACHE_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _kept_bytes(self) -> int:
        return sum(map(self._size_bytes, self._kept.values()))


def numeric_blocks(rows: int, chunk_rows: int, load: Callable[[slice], np.ndarray]) -> Blocks:
    """Return the Blocks of an array of `rows` rows whose chunks have `chunk_rows` each."""
    return Blocks(
        lambda selected: selected // chunk_rows,
        lambda number: number * chunk_rows,
        lambda number: load(slice(number * chunk_rows, min((number + 1) * chunk_rows, rows))),
        lambda block, selected, first: block[selected - first],
        lambda block: block.nbytes,
    )
