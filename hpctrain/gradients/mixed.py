"""Mixed precision: 16-bit compute with 32-bit master weights (Micikevicius et al., 2018).

    arena.param, float32   --rounded before each gradient-->   copy, 16 bits    forward, backward
    arena.grad, float32    <--widened, slot by slot---------   gradient, 16 bits

So engines, optimizers, the wire and checkpoints treat it like any other model. Products add in
float32; norms, softmax and losses are computed in float32. Samples and activations have 16 bits.

bf16 has the range of float32. fp16 has a smaller range, in which small gradients would become 0. So
the loss is multiplied by a power of two (loss_scale.py), and gradients are divided by it when they
are widened, which is exact. A gradient that overflows is computed again with half the scale. No
step is skipped, and ranks need not agree on a scale, except where layers sum over ranks: there all
ranks compute again. Checkpoints contain each worker's scale, because the rounding of small
gradients depends on the scale.
The price: slots are ready, and are sent, only after backward, when all are known to be finite.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.gradients.loss_scale import LossScale
from hpctrain.gradients.replica import (
    Batch,
    ModelReplica,
    WrappedReplica,
    mean_factor,
    needed,
    split_batch,
)
from hpctrain.nn.metrics.metric import Observer


def half_dtype(name: str) -> np.dtype:
    """Return the 16-bit dtype "bf16" or "fp16"."""
    if name == "fp16":
        return np.dtype(np.float16)
    from ml_dtypes import bfloat16  # late: few runs need it

    return np.dtype(bfloat16)


class MixedReplica(WrappedReplica):
    """A Replica that computes in 16 bits, with 32-bit master weights in its arena."""

    def __init__(self, model: nn.Model, seed: int, dtype: np.dtype, on_gpu: bool):
        """Create a ModelReplica of `model`, with a copy of weights and a gradient in `dtype`."""
        super().__init__(ModelReplica(model, seed, np.float32, on_gpu))
        self.model, self.loss = model, model.loss
        self.micro_batches = 1
        self.loss_scale = LossScale() if dtype == np.float16 else None
        param = self.arena.param
        zeros = xp.namespace(param).zeros
        self._half_params, self._half_grad = zeros(param.size, dtype), zeros(param.size, dtype)
        wide_parameters = {name: p for name, p in model.parameters.items() if p.wide}
        self._wide_grads = {n: zeros(p.shape, np.float32) for n, p in wide_parameters.items()}
        self._slots = {slot.name: slot for slot in self.arena.slots}
        self._bind_views()

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        super().move(**planes)
        self._bind_views()

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        metric_sums: nn.Sums = {}
        scale *= mean_factor(self.loss, batch, key)
        key = self._round_params(key)
        grad_views = needed(key, self._grad_views)
        for i, (piece, first) in enumerate(split_batch(batch, self.micro_batches)):
            is_last = i == self.micro_batches - 1

            def take_slot(name: str, accumulate: bool = i > 0, is_last: bool = is_last) -> None:
                slot_grad, g = grad_views[name], self._grads[name]
                if self.loss_scale is not None:
                    g = xp.widened(g) * (1 / self.loss_scale.factor)
                if accumulate:
                    slot_grad += g
                else:
                    slot_grad[...] = g
                if is_last:
                    on_ready(name)

            piece_key = key._replace(first=key.first + first)
            compute = self._compute_gradient
            if self.loss_scale is not None:
                compute = partial(self._compute_until_finite, self.loss_scale)
            metric_sums = nn.add(metric_sums, compute(piece, scale, piece_key, take_slot))
        return metric_sums

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        self._round_all_params()
        return self.model.evaluate(self._params, batch.inputs, batch.targets, observe)

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...), float32, on the host."""
        self._round_all_params()
        return xp.to_host(xp.widened(self.model.outputs(self._params, x)))

    def _compute_gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        params = needed(key, self._params)
        planes = params, self._grads, batch.inputs, batch.targets
        return self.model.gradient(*planes, scale, key, on_ready)

    def _compute_until_finite(
        self,
        loss_scale: LossScale,
        batch: Batch,
        scale: float,
        key: nn.Key,
        take_slot: Callable[[str], None],
    ) -> nn.Sums:
        """Compute a gradient, with smaller factors until it is finite; then call `take_slot`."""
        ready_names: list[str] = []
        while True:
            ready_names.clear()
            factor = scale * loss_scale.factor
            sums = self._compute_gradient(batch, factor, key, ready_names.append)
            grad_overflowed, loss_overflowed = self._check_overflow(key, sums)
            # The engine handles a gradient that is not finite with the smallest factor.
            if loss_overflowed or not grad_overflowed or not loss_scale.halve():
                break
            key = key._replace(recomputed=True)
        for name in ready_names:
            take_slot(name)
        loss_scale.count_gradient()
        return sums

    def _check_overflow(self, key: nn.Key, sums: nn.Sums) -> tuple[bool, bool]:
        """Return whether the gradient, and whether the loss, is not finite.

        If layers sum over ranks, the results are true if they are true on any rank. One small copy
        from the device.
        """
        is_finite = xp.namespace(self._half_grad).isfinite
        all_finite = is_finite(self._half_grad).all()
        for x in self._wide_grads.values():
            all_finite = all_finite & is_finite(x).all()
        grad_flag = 1 - xp.to_host(all_finite.astype(np.float64))
        flags = np.array([grad_flag, not isfinite(sums["loss"].sum)])
        if self.normalizes_batch and key.sum_over_ranks is not None:
            flags = key.sum_over_ranks(flags)
        return bool(flags[0]), bool(flags[1])

    def _round_params(self, key: nn.Key) -> nn.Key:
        """Round all parameters now, or each in the first `on_need` of the returned key."""
        on_need = key.on_need
        if on_need is None:
            self._round_all_params()
            return key

        unrounded_slots = dict(self._slots)

        def round_slot(name: str) -> None:
            on_need(name)
            if slot := unrounded_slots.pop(name, None):
                elements = slice(slot.offset, slot.stop)
                self._half_params[elements] = self.arena.param[elements]

        return key._replace(on_need=round_slot)

    def _round_all_params(self) -> None:
        self._half_params[...] = self.arena.param

    def _bind_views(self) -> None:
        """Create a view of each tensor in the planes."""
        arena = self.arena
        param_views: dict[str, Any] = arena.views(arena.param)
        self._grad_views = arena.views(arena.grad)
        wide_params = {name: param_views[name] for name in self._wide_grads}
        self._params = arena.views(self._half_params) | wide_params | arena.views(arena.buffer)
        self._grads = arena.views(self._half_grad) | self._wide_grads
