"""Causal self-attention with several heads (Vaswani et al., 2017).

    q, k, v = x W + b      a = softmax(q kᵀ / sqrt(d), causal mask)      y = (a v) W' + b'

One product computes q, k and v of all heads, and each head is a view of the result: nothing is
transposed or copied. On the host, scores and softmax are computed sample by sample, so that their
heads * length^2 numbers stay in the cache; they are saved for backward. On a device all samples are
computed at once, because there the number of kernels decides the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, namespace, narrowed, on_device, widened
from hpctrain.nn.cuda import softmax
from hpctrain.nn.embedding import INIT_STD
from hpctrain.nn.layer import (
    Key,
    Later,
    Parameter,
    Shape,
    normal,
    require_at_least,
    rows_of,
    run_now,
    write_affine_gradients,
    zeros,
)


class AttentionSaved(NamedTuple):
    """The values saved for backward; `rows` counts the positions of all samples."""

    x: Array  #: (rows, width)
    qkv: Array  #: (n, length, 3, heads, width / heads)
    weights: Array  #: (n, heads, length, length)
    context: Array  #: (rows, width)


@dataclass(frozen=True)
class CausalAttention:
    """Attention of each position to itself and all earlier ones; samples are (length, width).

    `qkv_weight` is (width, 3 width), `out_weight` (width, width), with a bias each. `init_std` is
    the initial standard deviation of `out_weight`. Raises UsageError unless heads divide width.
    """

    heads: int
    init_std: float = INIT_STD

    def __post_init__(self) -> None:
        require_at_least(self, heads=(self.heads, 1))

    def output_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] % self.heads:
            raise UsageError(
                f"expected (length, width), width a multiple of {self.heads} heads, seen {shape}"
            )
        return shape

    def parameters(self, shape: Shape) -> dict[str, Parameter]:
        width = shape[1]
        return {
            "qkv_weight": Parameter((width, 3 * width), normal(INIT_STD)),
            "qkv_bias": Parameter((3 * width,), zeros),
            "out_weight": Parameter((width, width), normal(self.init_std)),
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
        # In 16 bits the sums of softmax would lose small numbers.
        score_dtype = np.float32 if x.itemsize == 2 else x.dtype
        weights = xp.empty((n, self.heads, length, length), score_dtype)
        context = xp.empty((n, length, self.heads, width // self.heads), x.dtype)
        for i in _sample_indices(x):
            q, k, v = _split_heads(qkv[i])
            _matmul(q, k.swapaxes(-1, -2), out=weights[i])
            _softmax(weights[i], 1 / sqrt(q.shape[-1]))
            _matmul(weights[i], v, out=context[i].swapaxes(-3, -2))
        context = context.reshape(n * length, width)
        y = context @ p["out_weight"]
        y += p["out_bias"]
        return y.reshape(x.shape), AttentionSaved(flat, qkv, narrowed(weights, x), context)

    def backward(
        self,
        p: Mapping[str, Array],
        g: Mapping[str, Array],
        saved: AttentionSaved,
        dy: Array,
        want_dx: bool,
        later: Later = run_now,
    ) -> Array | None:
        shape, dy = dy.shape, dy.reshape(saved.x.shape)
        later(partial(write_affine_gradients, g, saved.context, dy, "out_weight", "out_bias"))
        dcontext = dy @ p["out_weight"].T
        dqkv = self._qkv_gradient(saved, dcontext).reshape(len(dy), 3 * dy.shape[1])
        later(partial(write_affine_gradients, g, saved.x, dqkv, "qkv_weight", "qkv_bias"))
        return (dqkv @ p["qkv_weight"].T).reshape(shape) if want_dx else None

    def _qkv_gradient(self, saved: AttentionSaved, dcontext: Array) -> Array:
        """Return the gradient of `qkv` from the gradient of `context`."""
        xp, (n, length, _, heads, d) = namespace(dcontext), saved.qkv.shape
        dqkv, dcontext = xp.empty_like(saved.qkv), dcontext.reshape(n, length, heads, d)
        for i in _sample_indices(dcontext):
            (q, k, v), (dq, dk, dv) = _split_heads(saved.qkv[i]), _split_heads(dqkv[i])
            a, dc = saved.weights[i], dcontext[i].swapaxes(-3, -2)
            _matmul(a.swapaxes(-1, -2), dc, out=dv)
            ds = widened(dc) @ widened(v).swapaxes(-1, -2)
            _softmax_gradient(ds, a, 1 / sqrt(d))
            _matmul(ds, k, out=dq)
            _matmul(ds.swapaxes(-1, -2), q, out=dk)
        return dqkv


def _sample_indices(x: Array) -> Iterable[Any]:
    """Return one index per sample, or on a device a single index for all samples."""
    return [...] if on_device(x) else range(len(x))


def _split_heads(qkv: Array) -> tuple[Array, Array, Array]:
    """Return q, k, v, each (..., heads, length, d), as views of (..., length, 3, heads, d)."""
    return tuple(qkv[..., i, :, :].swapaxes(-3, -2) for i in range(3))


def _matmul(a: Array, b: Array, out: Array) -> None:
    """Write the matrix products of `a` and `b`, (..., n, k) and (..., k, m), into `out`."""
    if min(a.itemsize, b.itemsize) > 2:
        namespace(a).matmul(a, b, out=out)
    else:  # CuPy multiplies batches of matrices only in float32 and float64
        out[...] = widened(a) @ widened(b)


def _softmax(scores: Array, factor: float) -> None:
    """Turn the scores (..., heads, length, length) into weights, in place."""
    if on_device(scores):
        return softmax.softmax(rows_of(scores), factor)
    scores *= factor
    scores += _causal_mask(scores.shape[-1], scores.dtype.name)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


def _softmax_gradient(ds: Array, weights: Array, factor: float) -> None:
    """Turn dL/dweights into dL/dscores, in place: ds = factor a (da - sum(a da))."""
    if on_device(ds):
        return softmax.backward(rows_of(ds), rows_of(weights), factor)
    # Masked positions have a = 0, so ds = 0.
    wide_weights = widened(weights)
    ds -= np.einsum("hij,hij->hi", wide_weights, ds)[..., None]
    ds *= wide_weights
    ds *= factor


@cache
def _causal_mask(length: int, dtype: str) -> np.ndarray:
    """Return the mask added to the scores: minus infinity for later places, else 0."""
    return np.triu(np.full((length, length), -np.inf, dtype), 1)
