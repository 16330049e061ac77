"""Causal self-attention with several heads (Vaswani et al., 2017).

    q, k, v = x W + b      a = softmax(q kᵀ / sqrt(d), causal mask)      y = (a v) W' + b'

One product computes q, k and v of all heads, and each head is a view of the result: nothing is
transposed or copied. Scores and softmax are computed sample by sample, so that their heads *
length^2 numbers stay in the cache; they are saved for backward. On a GPU: see cuda/attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import sqrt
from typing import NamedTuple

import numpy as np

from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, on_device
from hpctrain.nn.cuda import attention as cuda_attention
from hpctrain.nn.embedding import INIT_STD
from hpctrain.nn.layer import (
    Key,
    Later,
    Parameter,
    Shape,
    normal,
    require_at_least,
    run_now,
    write_affine_gradients,
    zeros,
)


class AttentionSaved(NamedTuple):
    """The values saved for backward; `rows` counts the positions of all samples."""

    x: Array  #: (rows, width)
    qkv: Array  #: (n, length, 3, heads, width / heads), on a GPU (3, n, heads, length, ...)
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
        n, length, width = x.shape
        flat = x.reshape(n * length, width)
        qkv = flat @ p["qkv_weight"]
        qkv += p["qkv_bias"]
        qkv = qkv.reshape(n, length, 3, self.heads, width // self.heads)
        context, saved_qkv, weights = (
            cuda_attention.attend(qkv) if on_device(x) else _attend_by_sample(qkv)
        )
        context = context.reshape(n * length, width)
        y = context @ p["out_weight"]
        y += p["out_bias"]
        return y.reshape(x.shape), AttentionSaved(flat, saved_qkv, weights, context)

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
        dcontext = dcontext.reshape(*shape[:2], self.heads, shape[2] // self.heads)
        qkv_gradient = cuda_attention.qkv_gradient if on_device(dy) else _qkv_gradient_by_sample
        dqkv = qkv_gradient(saved.qkv, saved.weights, dcontext).reshape(len(dy), 3 * dy.shape[1])
        later(partial(write_affine_gradients, g, saved.x, dqkv, "qkv_weight", "qkv_bias"))
        return (dqkv @ p["qkv_weight"].T).reshape(shape) if want_dx else None


def _attend_by_sample(qkv: Array) -> tuple[Array, Array, Array]:
    """Return context, `qkv` and weights of the host's `qkv` (n, length, 3, heads, d)."""
    n, length, _, heads, d = qkv.shape
    weights = np.empty((n, heads, length, length), qkv.dtype)
    context = np.empty((n, length, heads, d), qkv.dtype)
    for i in range(n):
        q, k, v = _split_heads(qkv[i])
        np.matmul(q, k.swapaxes(-1, -2), out=weights[i])
        _softmax(weights[i], 1 / sqrt(d))
        np.matmul(weights[i], v, out=context[i].swapaxes(-3, -2))
    return context, qkv, weights


def _qkv_gradient_by_sample(qkv: Array, weights: Array, dcontext: Array) -> Array:
    """Return the gradient of `qkv` from the gradient of the context (n, length, heads, d)."""
    dqkv = np.empty_like(qkv)
    for i, a in enumerate(weights):
        (q, k, v), (dq, dk, dv) = _split_heads(qkv[i]), _split_heads(dqkv[i])
        dc = dcontext[i].swapaxes(-3, -2)
        np.matmul(a.swapaxes(-1, -2), dc, out=dv)
        ds = dc @ v.swapaxes(-1, -2)
        # Backward of softmax: ds = a (da - sum(a da)). Masked positions have a = 0, so ds = 0.
        ds -= np.einsum("hij,hij->hi", a, ds)[..., None]
        ds *= a
        ds *= 1 / sqrt(q.shape[-1])
        np.matmul(ds, k, out=dq)
        np.matmul(ds.swapaxes(-1, -2), q, out=dk)
    return dqkv


def _split_heads(qkv: Array) -> tuple[Array, Array, Array]:
    """Return q, k, v, each (..., heads, length, d), as views of (..., length, 3, heads, d)."""
    return tuple(qkv[..., i, :, :].swapaxes(-3, -2) for i in range(3))


def _softmax(scores: Array, factor: float) -> None:
    """Turn the scores (..., heads, length, length) into weights, in place."""
    scores *= factor
    scores += _causal_mask(scores.shape[-1], scores.dtype.name)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)


@cache
def _causal_mask(length: int, dtype: str) -> np.ndarray:
    """Return the mask added to the scores: minus infinity for later places, else 0."""
    return np.triu(np.full((length, length), -np.inf, dtype), 1)
