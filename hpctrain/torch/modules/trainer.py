"""The Trainer of a torch.nn.Module: every engine, with its data sets and optimizers."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.optim import Optimizer
from hpctrain.torch.modules.model import TorchModel
from hpctrain.torch.modules.optimizers import MakeScheduler, as_optimizer
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
        optimizer: Optimizer | torch.optim.Optimizer | str,
        engine: Any = "allreduce",
        loss: Any = "cross_entropy",
        schedule: MakeScheduler | None = None,
        **options: Any,
    ):
        """Move the parameters into an arena and build the engine; collective.

        `optimizer`: as of `ht.Trainer`, or one of `torch.optim` for the parameters of `module` that
        treats each element by itself. With the latter `schedule` may make a scheduler for it, as
        `lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=900)`; it is stepped after each
        update. `options`: those of `ht.Trainer`, such as `seed`, `precision` and `callbacks`.
        """
        optimizer = as_optimizer(optimizer, module, schedule)
        super().__init__(TorchModel(module, loss), optimizer, engine, **options)

    @property
    def module(self) -> torch.nn.Module:
        """The module: its parameters are those of the last call of `fit`."""
        return self.replica.model.module

    def close(self) -> None:
        """End the engine's threads and free its links; collective."""
        super().close()
        self.replica.leave_arena()
