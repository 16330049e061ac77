"""The Trainer of a torch.nn.Module: every engine, with its data sets and optimizers."""

from __future__ import annotations

from typing import Any

import torch

import hpctrain.world
from hpctrain.optim import Optimizer
from hpctrain.torch.modules.model import TorchModel
from hpctrain.torch.modules.optimizers.conversion import (
    announce,
    as_optimizer,
    check_agreement,
    check_hooks,
    export_states,
)
from hpctrain.torch.modules.optimizers.schedulers import Schedule
from hpctrain.torch.modules.replica import TorchReplica
from hpctrain.training import trainer
from hpctrain.training.arguments import as_engine


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
        schedule: Schedule | None = None,
        **options: Any,
    ):
        """Move the parameters into an arena and build the engine; collective.

        `optimizer`: as of `ht.Trainer`, or one of `torch.optim` for the parameters of `module` that
        treats each element by itself; it continues from the states that it has, and its options
        and hooks are used, as PyTorch does. With the latter `schedule` may be a scheduler of it, or
        a function that makes one, as `lambda optimizer: StepLR(optimizer, 100)`; the Trainer steps
        it after each update. `options`: keywords of `ht.Trainer`, such as `seed`, `precision`,
        `world` and `callbacks`. Raises UsageError, on all ranks, for what it cannot use.
        """
        options["world"] = world = options.get("world") or hpctrain.world.init()
        flat = world.on_all_ranks(lambda: as_optimizer(optimizer, module, schedule))
        if isinstance(optimizer, torch.optim.Optimizer):
            world.on_all_ranks(lambda: check_hooks(optimizer, as_engine(engine)))
            check_agreement(world, optimizer)
            if world.rank == 0:
                announce(optimizer, schedule)
        model = world.on_all_ranks(lambda: TorchModel(module, loss))
        super().__init__(model, flat, engine, **options)

    @property
    def module(self) -> torch.nn.Module:
        """The module, with the parameters after the last call of `fit`."""
        self.replica.read_arena()
        return self.replica.model.module

    def close(self) -> None:
        """End the engine's threads and free its links; collective.

        An optimizer of PyTorch gets the states of its parameters, where a rank has all of them.
        """
        super().close()
        self.replica.leave_arena()
        export_states(self._optimizer)
