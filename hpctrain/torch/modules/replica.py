"""The Replica of a module: its parameters and gradients are views of an arena.

    arena.param    the memory of module.parameters()
    arena.grad     a hook of each parameter copies its gradient there, unless it is there, and calls
                   on_ready
    arena.buffer   what the module keeps beside them: see buffers.py

Autograd writes a gradient into a new tensor if there is none before; the copy into the arena takes
its place. Large matrices need no copy: see direct_gradients.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import torch

from hpctrain import nn
from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.loss_scale import LossScale
from hpctrain.gradients.precision import CPU_PRECISIONS, Precision, master_dtype
from hpctrain.gradients.replica import (
    Batch,
    ignore_ready,
    mean_factor,
    move_planes,
    need_all,
    split_batch,
)
from hpctrain.nn.metrics.metric import Observer
from hpctrain.optim.absent import ABSENT
from hpctrain.torch.modules.acceptance import describe_changes, must_be_dense
from hpctrain.torch.modules.buffers import ModuleBuffers
from hpctrain.torch.modules.direct_gradients import DirectGradients
from hpctrain.torch.modules.draws import SampleDraws, gradient_key, recompute
from hpctrain.torch.modules.inputs import as_arrays, as_tensor
from hpctrain.torch.modules.layers import restore_layers
from hpctrain.torch.modules.losses import compute_sums, metric_arrays
from hpctrain.torch.modules.model import TorchModel
from hpctrain.torch.modules.names import Names, is_compiled
from hpctrain.torch.modules.needs import ParameterNeeds
from hpctrain.torch.tensors import between_cupy_work, caller_stream, joined_streams
from hpctrain.transport.shared_memory.host import aligned_zeros

log = logging.getLogger(__name__)
MAX_EVALUATION_ROWS = 256  #: samples that `evaluate` computes at once


class TorchReplica:
    """See `hpctrain.gradients.replica.Replica`."""

    def __init__(self, model: TorchModel, seed: int, precision: Precision, on_gpu: bool):
        """Move the parameters of `model.module` into an arena, in the dtype of `precision`.

        With "bf16" and "fp16" the forward pass is one of `torch.autocast`; see loss_scale.py for
        "fp16". Raises UsageError for a precision that is not available.
        """
        self.model, self.micro_batches = model, 1
        self._autocast = _autocast(precision, on_gpu)
        self.loss_scale = LossScale() if precision == "fp16" else None
        dtype = master_dtype(precision)
        dtype_in_torch = getattr(torch, dtype.name)
        device = f"cuda:{xp.zeros(1, dtype).device.id}" if on_gpu else "cpu"  # of this rank
        module = model.module.to(device)
        names = Names(module)
        self._parameters = names.trained
        floats = {n: p for n, p in names.parameters.items() if p.is_floating_point()}
        self._own_dtypes = {p.dtype: name for name, p in floats.items()}
        self._buffers = ModuleBuffers(names, dtype_in_torch)
        self._draws = SampleDraws(is_compiled(module))
        in_python = not is_compiled(module) and not on_gpu  # backward, and in this thread
        self._direct = DirectGradients(self._parameters if in_python else {})
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        zeros = xp.zeros if on_gpu else aligned_zeros
        arena = arenas.make_arena(shapes, dtype, self._buffers.shapes, zeros)
        slots = {slot.name for slot in (*arena.slots, *arena.buffer_slots)}
        ties = {other: first for other, first in names.ties.items() if first in slots}
        self.arena = replace(arena, integers=self._buffers.integers, ties=ties)
        self._bind_views()
        with joined_streams(arena.param), torch.no_grad():
            for name, p in self._parameters.items():
                self._views[name].copy_(p)
            self._buffers.fill(arena.views(arena.buffer))
        self._adopt_views()
        self._written: set[str] = set()  # slots with a gradient, of a piece of this step
        model.bind_parameters()
        self._on_ready: Callable[[str], None] | None = None  # within a gradient
        self._unready: set[str] = set()
        self._needs: ParameterNeeds | None = None
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._take_gradient, name))
            for name, p in self._parameters.items()
        ]

    @property
    def loss(self) -> nn.Loss:
        """The loss of the model."""
        return self.model.loss

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch."""
        return self.model.normalizes_batch

    @between_cupy_work
    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient into the arena, as the sum over micro-batches; see Replica."""
        self.model.must_be_bound()
        self._buffers.load()
        for p in self._parameters.values():
            p.grad = None  # of a backward pass before
        scale *= mean_factor(self.loss, batch, key)
        if self.loss_scale is None:
            sums = self._compute_pieces(batch, scale, key, on_ready)
        else:
            sums = self._compute_until_finite(self.loss_scale, batch, scale, key)
            for name in reversed(self._parameters):
                on_ready(name)
        self._buffers.store()
        return sums

    def _compute_until_finite(
        self, loss_scale: LossScale, batch: Batch, scale: float, key: nn.Key
    ) -> nn.Sums:
        """Compute a gradient, with smaller factors of the loss until it is finite."""
        while True:
            sums = self._compute_pieces(batch, scale * loss_scale.factor, key, ignore_ready)
            loss = sum(total.sum for name, total in sums.items() if name == "loss")
            is_finite = bool(torch.isfinite(as_tensor(self.arena.grad)).all())
            flags = np.array([not is_finite, not isfinite(loss)], np.float64)
            if self.normalizes_batch and key.sum_over_ranks is not None:
                flags = key.sum_over_ranks(flags)  # then all ranks compute again
            grad_overflowed, loss_overflowed = flags.tolist()
            # The engine handles a gradient that is not finite with the smallest factor.
            if loss_overflowed or not grad_overflowed or not loss_scale.halve():
                loss_scale.count_gradient()
                return sums
            key = key._replace(recomputed=True)

    def _compute_pieces(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Compute the gradients of the micro-batches."""
        sums: nn.Sums = {}
        for i, (piece, first) in enumerate(split_batch(batch, self.micro_batches)):
            is_last = i == self.micro_batches - 1
            self._written, self._unready = self._written if i else set(), set(self._parameters)
            self._on_ready = on_ready if is_last else ignore_ready
            piece_key = key._replace(first=key.first + first)
            try:
                sums = nn.add(sums, self._compute_gradient(piece, scale, piece_key))
            finally:
                self._on_ready = None
            for name in sorted(self._unready):  # parameters that the loss does not depend on
                if name not in self._written:
                    self._grads[name].fill_(ABSENT)
                if is_last:
                    on_ready(name)
        return sums

    @between_cupy_work
    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`; see Replica."""
        self._buffers.load()
        sums: nn.Sums = {}
        for start in range(0, batch.n, MAX_EVALUATION_ROWS):
            piece = batch.part(start, min(start + MAX_EVALUATION_ROWS, batch.n))
            with self._autocast, torch.no_grad():
                outputs = self.model.outputs(piece.inputs)
            loss, like = self.loss, self._parameter
            own = compute_sums(loss, outputs, piece.targets, piece.n, scale=None, like=like)
            sums = nn.add(sums, own)
            if observe is not None:
                observe(*metric_arrays(loss, outputs, piece.targets))
        return sums

    @between_cupy_work
    def predict(self, x: Any) -> Any:
        """Return the module's outputs for samples `x` (n, ...), on the host."""
        self._buffers.load()
        with self._autocast:
            return as_arrays(self.model.outputs(x))

    @between_cupy_work
    def read_arena(self) -> None:
        """Copy the integers that an engine changed in the arena into the module."""
        self._buffers.load()

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        self.arena = move_planes(self.arena, planes)
        self._bind_views()
        self._adopt_views()

    @between_cupy_work
    def leave_arena(self) -> None:
        """Move the module's parameters and buffers to private memory, with their values."""
        self._buffers.load()
        self._buffers.leave()
        for p in self._parameters.values():
            p.data = p.data.clone()
        for hook in self._hooks:
            hook.remove()
        if self._needs is not None:
            self._needs.remove_hooks()
        restore_layers(self.model.module)

    def _compute_gradient(self, batch: Batch, scale: float, key: nn.Key) -> nn.Sums:
        """Compute the gradient of a piece of a batch."""
        if batch.n == 0 and not (self.normalizes_batch and key.sum_over_ranks is not None):
            need_all(key, self._parameters)
            return nn.losses.zero_sums(self.loss.terms)
        if key.on_need is not None and self._needs is None:
            names_by_id = {id(p): name for name, p in self._parameters.items()}
            self._needs = ParameterNeeds(self.model.module, names_by_id)
        with gradient_key(key, batch.n), ExitStack() as draws:
            if self._draws.is_on:
                draws.enter_context(self._draws)
            forward = self._needs.forward(key.on_need) if self._needs is not None else nullcontext()
            with forward, self._autocast:
                outputs = self.model.call(batch.inputs)
            self._draws.end_forward()
            if not self._draws.has_seen:
                draws.close()
            need_all(key, self._parameters)  # backward writes where sums may still wait
            recompute()
            backward = self._direct if self._direct.begin(self._written) else nullcontext()
            loss, like = self.loss, self._parameter
            return compute_sums(
                loss, outputs, batch.targets, batch.n, scale=scale, like=like, backward=backward
            )

    def _take_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the final gradient of a parameter into the arena, and call `on_ready`."""
        if self._on_ready is None:  # backward of the user's own
            return
        gradient, plane_gradient = parameter.grad, self._grads[name]
        must_be_dense(name, gradient)
        factor = 1 if self.loss_scale is None else 1 / self.loss_scale.factor
        if name in self._written:
            plane_gradient.add_(gradient, alpha=factor)
        else:
            gradient = gradient if factor == 1 else gradient * factor
            if gradient.data_ptr() != plane_gradient.data_ptr():
                torch.add(gradient, 0.0, out=plane_gradient)  # -0.0 + 0.0 = 0.0, unlike ABSENT
            self._written.add(name)
        parameter.grad = None
        self._unready.discard(name)
        with caller_stream(plane_gradient):
            self._on_ready(name)

    def _bind_views(self) -> None:
        """Create tensors that are views of the planes."""
        views, grads = (self.arena.views(x) for x in (self.arena.param, self.arena.grad))
        self._views = {name: as_tensor(x) for name, x in views.items()}
        self._grads = {name: as_tensor(x) for name, x in grads.items()}
        self._direct.bind(self.arena.slots, self._grads)

    def _adopt_views(self) -> None:
        """Let the module's parameters and floating-point buffers lie in the planes."""
        for name, p in self._parameters.items():
            p.data = self._views[name]
        self._buffers.bind(self.arena.views(self.arena.buffer))

    def announcements(self, ranks: int) -> list[str]:
        """Return a text for each property of the module that training changes."""
        dtypes, dtype = self._own_dtypes, as_tensor(self.arena.param).dtype
        cast_names = self._buffers.cast_names
        return describe_changes(dtypes, cast_names, dtype, self.model.was_in_evaluation)

    @property
    def _parameter(self) -> torch.Tensor:
        """A parameter: samples become tensors of its dtype."""
        return next(iter(self._parameters.values()))


def _autocast(precision: Precision, on_gpu: bool) -> AbstractContextManager[Any]:
    """Return the context in which a forward pass computes in `precision`."""
    if precision in CPU_PRECISIONS or (precision == "tf32" and on_gpu):
        if on_gpu:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        return nullcontext()
    if precision == "tf32":
        raise UsageError(
            "[run] precision: 'tf32' needs a GPU; expected device = 'gpu', or float32, float64, "
            "bf16 or fp16"
        )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast("cuda" if on_gpu else "cpu", dtype)
