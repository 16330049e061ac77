"""A model that computes in 16 bits, in an arena of 32: master weights (Micikevicius et al., 2018).

    arena.param, float32   --rounded before each gradient-->   copy, 16 bits    forward, backward
    arena.grad, float32    <--widened, slot by slot---------   gradient, 16 bits

So engines, optimizers, the wire and checkpoints treat it as any other model. Products add in
float32; so are norms, softmax and losses computed. Samples and all between layers have 16 bits.

bf16 has the range of float32. fp16 has not: gradients are small, and vanish. There the loss counts
`scale` times, a power of two, and gradients are divided by it when they are widened: as the largest
are still far from overflow, no digit is lost by it. A gradient that overflows is computed again
with half the scale, and after GROW_EVERY that did not the scale is doubled. Nothing is skipped,
and ranks need not agree on a scale, except where layers sum over ranks: there all compute again.
Checkpoints keep each worker's scale: small gradients are rounded by it.
The price: slots are ready, and are sent, only after backward, when all are known to be finite.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.replica import Batch, ModelReplica, in_pieces

GROW_EVERY = 1000  #: gradients without overflow after which the scale is doubled
LARGEST, SMALLEST = 2.0**24, 2.0**-14


def dtype_named(name: str) -> np.dtype:
    """Return the 16-bit dtype "bf16" or "fp16"; raise UsageError if it is not installed."""
    if name == "fp16":
        return np.dtype(np.float16)
    try:
        import ml_dtypes
    except ImportError:
        raise UsageError(
            "[run] precision: bf16 needs ml_dtypes, which the extras bring: pip install "
            "'hpctrain[cuda13x]' (with a driver for CUDA 12: 'hpctrain[cuda12x]')"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


class MixedReplica:
    """See `hpctrain.gradients.replica.Replica`."""

    def __init__(self, model: nn.Model, seed: int, dtype: np.dtype, on_gpu: bool):
        """Lay `model` out, see ModelReplica, with a copy and a gradient in `dtype` beside."""
        self._master = ModelReplica(model, seed, np.float32, on_gpu)
        self.model = model
        self.micro_batches = 1
        self.scale = 2.0**15 if dtype == np.float16 else 1.0  #: of the loss
        self._checked, self._good = dtype == np.float16, 0
        param = self.arena.param
        make = xp.namespace(param).zeros
        self._copy, self._small = make(param.size, dtype), make(param.size, dtype)
        self._wide = {n: make(p.shape, np.float32) for n, p in model.parameters.items() if p.wide}
        self._slots = {slot.name: slot for slot in self.arena.slots}
        self._bind_views()

    @property
    def arena(self) -> Arena:
        """The arena of the master weights and the widened gradients."""
        return self._master.arena

    def move(self, **planes: np.ndarray) -> None:
        """Let planes lie elsewhere; see Replica."""
        self._master.move(**planes)
        self._bind_views()

    @property
    def scaling(self) -> np.ndarray | None:
        """The loss scale, and gradients since it changed, float64 (2,); None for bf16."""
        return np.array([self.scale, self._good]) if self._checked else None

    def scale_as(self, saved: np.ndarray) -> None:
        """Take a `scaling`, or a mean of several: scales are powers of two."""
        self.scale, self._good = 2.0 ** np.floor(np.log2(saved[0])), int(saved[1])

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        sums, key = nn.Sums(0.0, 0, 0), self._rounded(key)
        for i, (piece, first) in enumerate(in_pieces(batch, self.micro_batches)):
            last = i == self.micro_batches - 1

            def take(name: str, add: bool = i > 0, last: bool = last) -> None:
                self._widen(name, add)
                if last:
                    on_ready(name)

            piece_key = key._replace(first=key.first + first)
            compute = self._until_finite if self._checked else self._gradient
            sums = nn.add(sums, compute(piece, scale, piece_key, take))
        return sums

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        self._round_all()
        return self.model.evaluate(self._params, *batch)

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...), float32, of the host."""
        self._round_all()
        return xp.to_host(xp.wide(self.model.outputs(self._params, x)))

    def _gradient(
        self, batch: Batch, scale: float, key: nn.Key, ready: Callable[[str], None]
    ) -> nn.Sums:
        return self.model.gradient(self._params, self._grads, *batch, scale, key, ready)

    def _until_finite(
        self, batch: Batch, scale: float, key: nn.Key, take: Callable[[str], None]
    ) -> nn.Sums:
        """Compute a gradient with ever smaller scales until it is finite; then take its slots."""
        order: list[str] = []
        while True:
            order.clear()
            sums = self._gradient(batch, scale * self.scale, key, order.append)
            bad, lost = self._overflowed(key, sums)
            if lost or not bad or self.scale <= SMALLEST:
                break  # the engine handles a gradient that is still not finite
            self.scale, self._good = self.scale / 2, 0
            key = key._replace(recomputed=True)
        for name in order:
            take(name)
        self._good += 1
        if self._good == GROW_EVERY:
            self.scale, self._good = min(2 * self.scale, LARGEST), 0
        return sums

    def _overflowed(self, key: nn.Key, sums: nn.Sums) -> tuple[bool, bool]:
        """Return whether the gradient, and whether the loss, is not finite; one small copy.

        If layers sum over ranks: whether that holds on any rank.
        """
        every = xp.namespace(self._small).isfinite
        fine = every(self._small).all()
        for x in self._wide.values():
            fine = fine & every(x).all()
        local = np.array([1 - xp.to_host(fine.astype(np.float64)), not isfinite(sums.loss)])
        together = key.sum_over_ranks if self.model.buffers else None
        bad, lost = local if together is None else together(local)
        return bool(bad), bool(lost)

    def _widen(self, name: str, add: bool) -> None:
        """Widen the gradient of slot `name` into the arena, or add it there."""
        into, g = self._masters[name], self._grads[name]
        g = g if self.scale == 1 else xp.wide(g) * (1 / self.scale)
        if add:
            into += g
        else:
            into[...] = g

    def _rounded(self, key: nn.Key) -> nn.Key:
        """Round the parameters, all now, or each when its `on_need` is called; return the key."""
        need = key.on_need
        if need is None:
            self._round_all()
            return key

        def round_slot(name: str) -> None:
            need(name)
            if name in self._slots:
                slot = self._slots[name]
                at = slice(slot.offset, slot.stop)
                self._copy[at] = self.arena.param[at]

        return key._replace(on_need=round_slot)

    def _round_all(self) -> None:
        self._copy[...] = self.arena.param

    def _bind_views(self) -> None:
        """Find the tensors in the planes."""
        arena = self.arena
        masters: dict[str, Any] = arena.views(arena.param)
        self._masters = arena.views(arena.grad)
        wide = {name: masters[name] for name in self._wide} | arena.views(arena.buffer)
        self._params = arena.views(self._copy) | wide
        self._grads = arena.views(self._small) | self._wide
