"""The Trainer of a torch.nn.Module: every engine, with its data sets and optimizers."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.optim import Optimizer
from hpctrain.torch.modules.model import TorchModel
from hpctrain.torch.modules.replica import TorchReplica
from hpctrain.training import trainer


class Trainer(trainer.Trainer):
    """A module, an optimizer and an engine, ready to be trained; every rank makes its own.

    As `ht.Trainer`, with the loss as an argument: a name such as "cross_entropy", an `ht.nn.Loss`,
    or a function of outputs and targets; see `ht.torch.Loss`. `module` holds the trained weights,
    also after `close`.
    """

    replica: TorchReplica

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer | str,
        engine: Any = "allreduce",
        loss: Any = "cross_entropy",
        **options: Any,
    ):
        """Move the parameters into an arena and build the engine; collective.

        `options`: those of `ht.Trainer`, such as `seed`, `precision` and `callbacks`.
        """
        super().__init__(TorchModel(module, loss), optimizer, engine, **options)

    @property
    def module(self) -> torch.nn.Module:
        """The module: its parameters are those of the last call of `fit`."""
        return self.replica.model.module

    def close(self) -> None:
        """End the engine's threads and free its links; collective."""
        super().close()
        self.replica.leave_arena()
