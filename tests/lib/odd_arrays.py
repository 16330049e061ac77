"""Odd arrays (NaNs, infinities, signed zeros, strides): values per rank and expected reductions.

An array is made of columns, one value for each rank: NaNs of other bits, zeros of both signs,
denormals, inf - inf, the largest numbers, what wraps around. Its columns begin where `shift` says
and repeat to its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from cases import dtype_of, kept

FRACTION_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
          "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
BOOLS = {"sum": np.any, "prod": np.all, "min": np.all, "max": np.any, "and": np.all, "or": np.any,
         "xor": lambda rows, axis: np.sum(rows, axis=axis) % 2 == 1}  # fmt: skip


class Case(NamedTuple):
    """An array of `length` elements on each of `ranks` ranks, reduced by `op`."""

    ranks: int
    length: int
    dtype: str
    op: str
    shift: int = 0

    @property
    def exact(self) -> bool:
        """Whether all algorithms must have the same bytes, whatever the order."""
        return dtype_of(self.dtype).kind in "biu" or self.op in ("min", "max")


def finfo(dtype: str) -> np.finfo:
    return ml_dtypes.finfo(dtype_of(dtype))


@kept
def rows(case: Case) -> list[np.ndarray]:
    """Return what each rank has."""
    return _rows(case)


def _rows(case: Case) -> list[np.ndarray]:
    kind = dtype_of(case.dtype)
    if kind.kind == "c":
        parts = case._replace(dtype=f"float{4 * kind.itemsize}", length=2 * case.length)
        return [row.view(kind) for row in _rows(parts)]
    columns = np.stack(list((_floats if kind.kind in "fV" else _integers)(case)), axis=1)
    places = (np.arange(case.length) + case.shift) % columns.shape[1]
    return list(np.ascontiguousarray(columns[:, places]))


def _integers(case: Case) -> Iterator[np.ndarray]:
    kind, draw = dtype_of(case.dtype), np.random.default_rng(case.ranks)
    ends = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    columns = ([end] * case.ranks for end in ends)
    mixed = draw.integers(*ends, (9, case.ranks), dtype=np.int64, endpoint=True)
    for column in (*columns, [0] * case.ranks, range(case.ranks), *mixed):
        yield np.array(column).astype(kind)


def _floats(case: Case) -> Iterator[np.ndarray]:
    """Yield columns; of a sum and a product none depends on the order but by rounding."""
    kind, ranks, draw = dtype_of(case.dtype), np.arange(case.ranks), np.random.default_rng(7)
    first, last, info = ranks == 0, ranks == case.ranks - 1, finfo(case.dtype)
    yield _nans(case)
    yield np.where(first, -0.0, 0.0).astype(kind)
    yield np.where(first, np.inf, np.where(last, -np.inf, 1.0)).astype(kind)
    yield ((ranks + 1) * (-1.0) ** ranks).astype(kind) * info.smallest_subnormal
    yield np.where(last, _nans(case), kind.type(-1.5))
    yield np.where(first, _nans(case), kind.type(np.inf))
    yield np.where(first, 0.0, -0.0).astype(kind)
    yield np.full(case.ranks, -0.0, kind)
    yield np.where(last, -np.inf, 2.0).astype(kind)
    yield np.full(case.ranks, _large(case)).astype(kind)
    yield np.where(first, -1.0, _large(case)).astype(kind)
    for column in draw.uniform(0.5, 2.0, (8, case.ranks)) * draw.choice([-1, 1], (8, case.ranks)):
        yield column.astype(kind)


def _nans(case: Case) -> np.ndarray:
    """Return NaNs of other bits on each rank, of both signs."""
    kind = dtype_of(case.dtype)
    bits = np.full(case.ranks, np.nan, kind).view(f"u{kind.itemsize}")
    # NumPy 1.26 makes floats of uint64 and int64: each number is of this type.
    number, ranks = bits.dtype.type, np.arange(case.ranks).astype(bits.dtype)
    sign = number(1) << number(8 * kind.itemsize - 1)
    return ((bits & ~sign) + 3 * ranks + sign * (ranks % 2)).astype(bits.dtype).view(kind)


def _large(case: Case) -> float:
    """Return a number that is too large for others, and not for this operation."""
    largest = float(finfo(case.dtype).max)
    exponent = np.frexp(largest)[1] // case.ranks
    return {"sum": largest / (4 * case.ranks), "prod": 2.0 ** (exponent - 2)}.get(case.op, largest)


@kept
def expected(case: Case) -> np.ndarray:
    """Return what is to be found: its very bytes if `exact`, else in more digits than `dtype`."""
    kind, all_rows = dtype_of(case.dtype), np.stack(rows(case))
    if kind.kind == "b":
        return BOOLS[case.op](all_rows, axis=0)
    if kind.kind in "iu":
        return UFUNCS[case.op].reduce(all_rows, axis=0, dtype=kind)
    if case.op in ("min", "max"):
        columns = all_rows.view(f"u{kind.itemsize}").T.tolist()
        chosen = [_extreme(column, case) for column in columns]
        return np.array(chosen, f"u{kind.itemsize}").view(kind)
    wide = all_rows.astype(np.clongdouble if kind.kind == "c" else np.longdouble)
    if case.op == "prod":
        with np.errstate(invalid="ignore"):
            return np.multiply.reduce(wide, axis=0)
    parts = wide.view(np.longdouble) / (case.ranks if case.op == "mean" else 1)
    with np.errstate(invalid="ignore"):
        return parts.sum(axis=0).view(wide.dtype)


def _extreme(column: Sequence[int], case: Case) -> int:
    """Return the bits of the minimum or maximum of floats with these bits, as IEEE 754-2019 has it.

    Of NaNs, as extremum.py has it: the maximum is one with the sign and the least bits before one
    without it and the most bits; the minimum one without it and the least bits before one with it
    and the most.
    """
    fraction = FRACTION_BITS[case.dtype]
    top = 1 << (8 * dtype_of(case.dtype).itemsize - 1)
    infinity = top - (1 << fraction)
    nans = [bits for bits in column if bits % top > infinity]
    if nans:
        liked = [bits for bits in nans if (bits >= top) == (case.op == "max")]
        return min(liked) if liked else max(nans)
    by_size = sorted(column, key=lambda bits: -1 - bits % top if bits >= top else bits)
    return by_size[-1] if case.op == "max" else by_size[0]


def bound(case: Case) -> np.ndarray:
    """Return how far each result may be from the exact one: a rounding for each operation."""
    values = np.abs(np.stack(rows(case))).astype(np.longdouble)
    info = finfo(case.dtype if dtype_of(case.dtype).kind != "c" else rows(case)[0].real.dtype.name)
    size = np.prod(values, axis=0) if case.op == "prod" else np.sum(values, axis=0)
    size = size / case.ranks if case.op == "mean" else size
    return size * (case.ranks + 1) * float(info.eps) * 3 + 4 * float(info.smallest_subnormal)


def wrong(result: np.ndarray, case: Case, start: int = 0) -> list[int]:
    """Return the places where flat `found`, elements `start` .. of it, is not what is expected."""
    part = slice(start, start + result.size)
    reported = expected(case)[part]
    if case.exact:
        return [i for i in range(result.size) if result[i].tobytes() != reported[i].tobytes()]
    wide = result.astype(reported.dtype)
    equal = (wide == reported) | (_is_nan(wide) & _is_nan(reported))
    nearby = np.isfinite(reported) & (np.abs(wide - reported) <= bound(case)[part])
    return np.flatnonzero(~(equal | nearby)).tolist()


def _is_nan(x: np.ndarray) -> np.ndarray:
    """Return where `x` is not finite: of complex numbers a part may be so in several ways."""
    return ~np.isfinite(x) if x.dtype.kind == "c" else np.isnan(x)
