"""What a training must not lose: values that can be saved, restored, and broadcast from rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch

from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.elastic.sampler import ElasticSampler
from hpctrain.horovod.torch.functions import (
    PICKLER,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class State:
    """The base of states: callbacks, and methods that a subclass defines."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]):
        """`bcast_object` returns an object of rank 0 on all ranks."""
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Let `callbacks` be called after each loss of ranks, before the next `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset`, and the registered callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the values, to which a loss returns."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: ranks get lost, but none joins a running job.

        So this never raises HostsUpdatedInterrupt.
        """

    def save(self) -> None:
        """Copy every value, on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved values."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the values of rank 0, and save them; collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Be called after each loss of ranks, before the callbacks."""


class ObjectState(State):
    """Values that can be pickled, as attributes."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ):
        """Keep and save `kwargs`; raise TypeError for a value that cannot be pickled."""
        super().__init__(bcast_object, get_rank)
        self._saved: dict[str, bytes] = dict.fromkeys(kwargs, b"")
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Copy every value, on this rank."""
        self._saved = {name: _pickle(name, getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Return to the saved values."""
        for name, data in self._saved.items():
            setattr(self, name, pickle.loads(data))

    def sync(self) -> None:
        """Give all ranks the values of rank 0, and save them; collective."""
        values = self._bcast_object({name: getattr(self, name) for name in self._saved})
        if self._rank() != 0:
            for name, value in values.items():
                setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """The state of a training with PyTorch; its values are attributes.

    Of modules, optimizers, learning-rate schedulers and ElasticSamplers the state dicts are saved
    and broadcast, and the objects stay the same; any other value is pickled. After `sync` and
    `restore` such a value is a new object.

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)
    """

    _handlers: Mapping[str, StateHandler] = MappingProxyType({})  # until there are some

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ):
        """Keep and save the values; raise TypeError for one that cannot be pickled."""
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: make_handler(value) for name, value in values.items()}
        self._handlers = {name: made for name, made in handlers.items() if made is not None}
        for name in self._handlers:
            super().__setattr__(name, values.pop(name))
        super().__init__(broadcast_object, job.rank, **values)

    def save(self) -> None:
        """Copy every value, on this rank."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the saved values."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks the values of rank 0, and save them; collective."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value; a new module, optimizer or sampler takes the place of the earlier one."""
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """The base of classes that save, restore and broadcast a value of a kind."""

    def __init__(self, value: Any):
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value on this rank."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved value."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the value of rank 0; collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle and save another value."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Saves and broadcasts the state dict of an object."""

    def save(self) -> None:
        """Keep a copy of the state dict on this rank."""
        self._saved = deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the saved state dict."""
        self.value.load_state_dict(deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state dict of rank 0; collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


class ModelStateHandler(StateDictHandler):
    """Saves and broadcasts parameters and buffers."""

    def sync(self) -> None:
        """Take the parameters and buffers of rank 0, in place; collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateDictHandler):
    """Saves and broadcasts the state and the options of an optimizer."""

    def sync(self) -> None:
        """Take the state and options of rank 0; collective."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateDictHandler):
    """Saves and broadcasts how far an ElasticSampler is; `sync` shares out what remains."""


Registry = list[tuple[type, type[StateHandler]]]
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """Return the pairs of a class of values and the class of their handlers."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Let values of later states have the handler of the first pair of `registry` that fits."""
    global _registry
    _registry = registry


def make_handler(value: Any) -> StateHandler | None:
    """Return a handler of `value`; None if it is pickled."""
    fitting = (handler(value) for kind, handler in _registry if isinstance(value, kind))
    return next(fitting, None)


def _pickle(name: str, value: Any) -> bytes:
    try:
        return PICKLER.dumps(value)
    except Exception as error:
        raise TypeError(
            f"elastic state: '{name}' of {type(value)} cannot be pickled, as its values must be "
            f"to be saved and broadcast: {error}"
        ) from error
