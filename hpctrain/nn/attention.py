"""Causal self-attention with several heads (Vaswani et al., 2017).

    q, k, v = x W + b      a = softmax(q kᵀ / sqrt(d), places up to its own)      y = (a v) W' + b'

The heads are views of one product, and of each head the products are views of those: nothing is
transposed or copied. Samples go one by one through scores and softmax: heads * length^2 numbers
stay in the cache, and are saved for backward. A device takes all samples at once: there the number
of calls is the cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, on_device, widened
from hpctrain.nn.embedding import SPREAD
from hpctrain.nn.layer import Key, Parameter, Shape, at_least, normal, sum_rows, zeros


class AttentionSaved(NamedTuple):
    """The values saved for backward; rows are those of all samples."""

    x: Array  #: (rows, width)
    qkv: Array  #: (n, length, 3, heads, width / heads)
    weights: Array  #: (n, heads, length, length)
    mixed: Array  #: (rows, width)


@dataclass(frozen=True)
class CausalAttention:
    """Attention of every place to itself and to those before it: (length, width) -> the same.

    `qkv_weight` is (width, 3 width), `out_weight` (width, width), with a bias each. `spread` is the
    standard deviation of `out_weight` at the start. Raises UsageError unless heads divide width.
    """

    heads: int
    spread: float = SPREAD

    def __post_init__(self) -> None:
        at_least(self, heads=(self.heads, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] % self.heads:
            raise UsageError(
                f"expected (length, width), width a multiple of {self.heads} heads, seen {shape}"
            )
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        width = shape[1]
        return {
            "qkv_weight": Parameter((width, 3 * width), normal(SPREAD)),
            "qkv_bias": Parameter((3 * width,), zeros),
            "out_weight": Parameter((width, width), normal(self.spread)),
            "out_bias": Parameter((width,), zeros),
        }

    def forward(
        self, p: Mapping[str, Array], x: Array, key: Key | None
    ) -> tuple[Array, AttentionSaved]:
        xp, (n, length, width) = namespace(x), x.shape
        flat = x.reshape(n * length, width)
        qkv = flat @ p["qkv_weight"]
        qkv += p["qkv_bias"]
        qkv = qkv.reshape(n, length, 3, self.heads, width // self.heads)
        scores = np.float32 if x.itemsize == 2 else x.dtype  # else sums would lose small numbers
        weights = xp.empty((n, self.heads, length, length), scores)
        mixed = xp.empty((n, length, self.heads, width // self.heads), x.dtype)
        for i in _pieces(x):
            q, k, v = _by_head(qkv[i])
            _product(q, k.swapaxes(-1, -2), out=weights[i])
            _softmax(weights[i], 1 / sqrt(q.shape[-1]))
            _product(weights[i], v, out=mixed[i].swapaxes(-3, -2))
        mixed = mixed.reshape(n * length, width)
        y = mixed @ p["out_weight"]
        y += p["out_bias"]
        return y.reshape(x.shape), AttentionSaved(flat, qkv, narrowed(weights, x), mixed)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: AttentionSaved,
        dy: Array,
        want_dx: bool,
    ) -> Array | None:
        xp, shape = namespace(dy), dy.shape
        dy = dy.reshape(saved.x.shape)
        xp.matmul(saved.mixed.T, dy, out=g["out_weight"])
        sum_rows(dy, out=g["out_bias"])
        dmixed = dy @ p["out_weight"].T
        dqkv = self._inner(saved, dmixed).reshape(len(dy), 3 * dy.shape[1])
        xp.matmul(saved.x.T, dqkv, out=g["qkv_weight"])
        sum_rows(dqkv, out=g["qkv_bias"])
        return (dqkv @ p["qkv_weight"].T).reshape(shape) if want_dx else None

    def _inner(self, saved: AttentionSaved, dmixed: Array) -> Array:
        """Return the gradient of `qkv` given that of `mixed`."""
        xp, (n, length, _, heads, d) = namespace(dmixed), saved.qkv.shape
        dqkv, dmixed = xp.empty_like(saved.qkv), dmixed.reshape(n, length, heads, d)
        for i in _pieces(dmixed):
            (q, k, v), (dq, dk, dv) = _by_head(saved.qkv[i]), _by_head(dqkv[i])
            a, dm = saved.weights[i], dmixed[i].swapaxes(-3, -2)
            _product(a.swapaxes(-1, -2), dm, out=dv)
            ds, full = widened(dm) @ widened(v).swapaxes(-1, -2), widened(a)
            # Of softmax: ds = a (da - sum(a da)); masked places have a = 0 and stay out by it.
            ds -= _sum_product(full, ds)
            ds *= full
            ds *= 1 / sqrt(d)
            _product(ds, k, out=dq)
            _product(ds.swapaxes(-1, -2), q, out=dk)
        return dqkv


def _pieces(x: Array) -> Iterable[Any]:
    """Return the indices of the samples that are handled together."""
    return [...] if on_device(x) else range(len(x))


def _by_head(qkv: Array) -> tuple[Array, Array, Array]:
    """Return q, k, v, each (..., heads, length, d), as views of (..., length, 3, heads, d)."""
    return tuple(qkv[..., i, :, :].swapaxes(-3, -2) for i in range(3))


def _product(a: Array, b: Array, out: Array) -> None:
    """Write the matrix products of `a` and `b`, (..., n, k) and (..., k, m), into `out`."""
    if min(a.itemsize, b.itemsize) > 2:
        namespace(a).matmul(a, b, out=out)
    else:  # CuPy has products of many matrices in float32 and float64 alone
        out[...] = widened(a) @ widened(b)


def _sum_product(a: Array, b: Array) -> Array:
    """Return the sum of a * b over the last axis, which stays with length 1."""
    if on_device(a):
        return (a * b).sum(axis=-1, keepdims=True)
    return namespace(a).einsum("hij,hij->hi", a, b)[..., None]


def _softmax(scores: Array, factor: float) -> None:
    """Turn the scores (..., heads, length, length) into weights, in place."""
    scores *= factor
    scores += _mask(namespace(scores), scores.shape[-1], scores.dtype.name)
    scores -= scores.max(axis=-1, keepdims=True)
    namespace(scores).exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


@cache
def _mask(xp: Any, length: int, dtype: str) -> Array:
    """Return the mask added to the scores: minus infinity for later places, else 0."""
    return xp.asarray(np.triu(np.full((length, length), -np.inf, dtype), 1))
