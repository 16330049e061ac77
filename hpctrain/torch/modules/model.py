"""A module of PyTorch as a model of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch

from hpctrain import nn
from hpctrain.core.errors import UsageError
from hpctrain.core.trees import sample_count
from hpctrain.gradients.guests import GuestModel
from hpctrain.gradients.precision import Precision
from hpctrain.torch.modules.acceptance import (
    BoundParameters,
    check_module,
    own_precision,
)
from hpctrain.torch.modules.inputs import call_module
from hpctrain.torch.modules.layers import RankBatchNorm, replace_layers
from hpctrain.torch.modules.losses import (
    TorchLoss,
    as_loss,
    check_class_axis,
    compute_sums,
    metric_arrays,
)

CHECKED_SAMPLES = 2  #: computed before training; more than one, since some losses compare samples


class TorchModel(GuestModel):
    """A module and its loss, as the Trainer uses a model.

    `module` is called with an array of samples as a tensor (n, ...); with the values of a dict of
    arrays by keyword; with a tuple's by position. `loss` is a name, such as "cross_entropy",
    an `ht.nn.Loss`, or a function of outputs and targets that returns a scalar tensor; see
    `ht.torch.Loss` for sums and metrics. The module's layers are changed in place, until
    the Trainer is closed: Dropout draws masks by sample, and BatchNorm normalizes over the global
    batch; see layers.py. Parameters are named as in `module.state_dict()`, without the
    prefixes of wrappers. Raises UsageError for a module that cannot be trained so.
    """

    marks_absent = True  #: its replica marks slots without a gradient, see optim/absent.py

    def __init__(self, module: torch.nn.Module, loss: Any = "cross_entropy"):
        check_module(module)
        self.module, self._loss = module, as_loss(loss)
        self._is_default_loss = isinstance(loss, str)
        replace_layers(module)
        #: whether all of the module was in evaluation mode: training is then what `fit` means
        self.was_in_evaluation = not any(m.training for m in module.modules())
        if self.was_in_evaluation:
            module.train()
        self._bound: BoundParameters | None = None
        self._parameter = next(p for p in module.parameters() if p.is_floating_point())
        self._has_embedding = any(isinstance(m, torch.nn.Embedding) for m in module.modules())
        self.output_shape: tuple[int, ...] = ()

    @property
    def loss(self) -> nn.Loss:
        """The loss: the names of the sums, and the metrics."""
        return self._loss

    @loss.setter
    def loss(self, loss: Any) -> None:
        self._loss, self._is_default_loss = as_loss(loss), False

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    @property
    def targets(self) -> int:
        """The number of targets per sample, as `Sums` counts them."""
        return 1 if isinstance(self._loss, TorchLoss) else prod(self.output_shape[:-1])

    @property
    def normalizes_batch(self) -> bool:
        """Whether a layer uses statistics of the whole batch."""
        return any(isinstance(layer, RankBatchNorm) for layer in self.module.modules())

    @property
    def own_precision(self) -> Precision:
        """The dtype of the parameters; raise UsageError if it is none to train in."""
        return own_precision(self.module)

    def bind_parameters(self) -> None:
        """Note the parameters and which are trained."""
        self._bound = BoundParameters(self.module)

    def must_be_bound(self) -> None:
        """Raise UsageError if parameters were replaced, frozen or unfrozen since then."""
        if self._bound is not None:
            self._bound.check()

    def output_shape_for(self, samples: Any) -> tuple[int, ...]:
        """Return the shape of the output for one of `samples`: a few are computed, and their loss.

        Raises UsageError for samples of another shape than those before, for outputs that the loss
        does not accept, and for a loss that is no number.
        """
        self.must_be_bound()
        self.check_sample_shape(samples)
        x, y = samples.rows(np.arange(min(len(samples), CHECKED_SAMPLES)))
        outputs = self.outputs(x)
        if isinstance(outputs, torch.Tensor):
            self.output_shape = tuple(outputs.shape[1:])
            check_class_axis(self._loss, self.output_shape, y, self._is_default_loss)
        if isinstance(self._loss, TorchLoss):
            with self._loss.unwritten():
                n, like = sample_count(x), self._parameter
                compute_sums(self._loss, outputs, y, n, scale=None, like=like)
        elif not isinstance(outputs, torch.Tensor):
            raise UsageError(
                f"the loss {self._loss!r} needs a tensor of outputs, seen "
                f"{type(outputs).__name__}; give a function of outputs and targets as the loss"
            )
        return self.output_shape

    def outputs(self, x: Any) -> Any:
        """Return the module's outputs for samples `x` (n, ...), in evaluation mode."""
        with _evaluation_mode(self.module), torch.no_grad():
            return self.call(x)

    def call(self, x: Any) -> Any:
        """Return the module's outputs for samples `x`, arrays (n, ...)."""
        return call_module(self.module, x, self._parameter, self._has_embedding)

    def _metric_arrays(self, x: Any, y: Any) -> tuple[np.ndarray, Any]:
        """Return the outputs for samples `x`, and the targets, as metrics get them."""
        return metric_arrays(self._loss, self.outputs(x), y)

    def make_replica(self, seed: int, precision: Precision, on_gpu: bool) -> Any:
        """Return the Replica of this model; see `hpctrain.torch.modules.replica`."""
        from hpctrain.torch.modules.replica import TorchReplica

        return TorchReplica(self, seed, precision, on_gpu)

    def __repr__(self) -> str:
        name = type(self.module).__name__
        return f"{name} of PyTorch, {self.parameter_count:,} parameters, {self._loss!r}"


def as_model(module: torch.nn.Module) -> TorchModel:
    """Return the TorchModel of `module` with the loss cross_entropy."""
    return TorchModel(module)


@contextmanager
def _evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    """Put the module and all within it into evaluation mode meanwhile."""
    training_modules = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training_modules:
            m.training = True
