"""The parameters that a loop of the user's own trains, and their agreement over all ranks."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hpctrain.collectives.small_messages import is_equal
from hpctrain.core.errors import UsageError
from hpctrain.core.names import counted
from hpctrain.torch.gradient_sync.shared_state import broadcast_new
from hpctrain.world import World

log = logging.getLogger(__name__)

Parameters = dict[str, torch.nn.Parameter]
#: The identities of what is trained, which holds while the parameters live.
TrainedKey = tuple[int, ...]
COMPILED = "_orig_mod."  #: before the names of a compiled module
Hook = Callable[[torch.Tensor], None]

#: Backward passes after which frozen parameters leave the planes: networks that are trained in turn
#: freeze each other in every step.
SHRINK_AFTER = 8


class TrainedSet:
    """The trained parameters of a model, as all ranks agree on them, and their hooks."""

    def __init__(
        self, world: World, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ):
        """Agree on the parameters; collective. Raises UsageError on all ranks."""
        self._world, self._model, self._optimizer = world, weakref.ref(model), optimizer
        #: All parameters whose values ranks share, and hooks, by identity; the objects are held, so
        #: that no other one has the same.
        self._shared: dict[int, torch.Tensor] = {}
        self._hooks: dict[int, tuple[torch.Tensor, Any]] = {}
        self._hook: Hook | None = None
        self._is_noted = False  # since the last backward pass
        self._stable_passes = 0
        self.parameters: Parameters = {}
        self._agree_on_parameters(model)
        warn_of_sparse(world, model)
        self._share_parameters(model)
        self._key = self._noted_key = trained_key(model, optimizer)

    def agree(self) -> None:
        """Agree on the trained parameters, and broadcast rank 0's new ones; collective.

        Raises UsageError on all ranks.
        """
        if (model := self._model()) is None:
            raise UsageError("ht.torch.sync: the model was deleted; call close() before")
        self._agree_on_parameters(model)
        new_parameters = {n: p for n, p in model.named_parameters() if id(p) not in self._shared}
        layout = str([(name, tuple(p.shape), str(p.dtype)) for name, p in new_parameters.items()])
        self._world.must_agree(layout, "the new parameters of ht.torch.sync")
        if broadcast_new(self._world, list(new_parameters.values())) and self._world.rank == 0:
            log.warning(
                "ht.torch.sync: '%s' was new and not the same on all ranks; rank 0's values are "
                "used from now on: seed ranks alike before you make layers",
                next(iter(new_parameters)),
            )  # fmt: skip
        self._share_parameters(model)
        for identity in self._hooks.keys() - self._shared.keys():
            self._hooks.pop(identity)[1].remove()
        self._key, self._stable_passes = self._noted_key, 0

    def _share_parameters(self, model: torch.nn.Module) -> None:
        # An optimizer may still hold parameters of a layer that was replaced.
        replaced_parameters = (p for p in _params(self._optimizer) if id(p) in self._shared)
        self._shared = {id(p): p for p in (*model.parameters(), *replaced_parameters)}

    def _agree_on_parameters(self, model: torch.nn.Module) -> None:
        shared_ids = self._shared.keys() | {id(p) for p in model.parameters()}
        self._world.on_all_ranks(lambda: check_trained(model, self._optimizer, shared_ids))
        parameters = trained_parameters(model)
        must_train_alike(self._world, parameters)
        self.parameters = parameters

    def watch(self, hook: Hook) -> None:
        """Call `hook` with each trained parameter whose gradient is complete, from now on."""
        self._hook = hook
        self._hook_new(self.parameters.values())

    def unwatch(self) -> None:
        """Remove the hooks."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks, self._hook = {}, None

    def note(self) -> None:
        """Note what is trained now; the hooks of new parameters are called from now on."""
        if (model := self._model()) is None:
            return
        self._is_noted = True
        key = trained_key(model, self._optimizer)
        if key != self._noted_key:
            self._noted_key = key
            self._hook_new(model.parameters())

    def _hook_new(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._hook is None:
            return
        new_parameters = [p for p in parameters if p.requires_grad and id(p) not in self._hooks]
        if any(p._post_accumulate_grad_hooks for p in new_parameters) and self._world.rank == 0:
            log.warning(
                "ht.torch.sync: parameters have hooks, which get this rank's own gradients: "
                "gradients are means when backward() has returned; step the optimizer then"
            )
        for p in new_parameters:
            self._hooks[id(p)] = p, p.register_post_accumulate_grad_hook(self._hook)

    def has_changed(self) -> bool:
        """Return whether the trained parameters differ from the agreed ones; once per backward."""
        if not self._is_noted:
            self.note()
        self._is_noted = False
        return self._noted_key != self._key

    def may_shrink(self, count: int) -> bool:
        """Return whether frozen ones among `count` parameters may leave, after a pass without a
        change; the same on all ranks."""
        self._stable_passes += 1
        return self._stable_passes == SHRINK_AFTER and count > len(self.parameters)


def trained_parameters(model: torch.nn.Module) -> Parameters:
    """Return the parameters of `model` that require gradients, by name; tied ones once."""
    named_parameters = ((n.replace(COMPILED, ""), p) for n, p in model.named_parameters())
    return {name: p for name, p in named_parameters if p.requires_grad}


def trained_key(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> TrainedKey:
    """Return the identities of the trained parameters; much faster than their names."""
    key: list[int] = []
    _append_identities(model, key.append)
    key += [id(p) for p in _params(optimizer) if p.requires_grad]
    return tuple(key)


def _append_identities(module: torch.nn.Module, append: Callable[[int], None]) -> None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter.requires_grad:
            append(id(parameter))
    for child in module._modules.values():
        if child is not None:
            _append_identities(child, append)


def check_trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, shared_ids: Set[int]
) -> None:
    """Raise UsageError for what cannot be summed, or is trained and not among `shared_ids`."""
    lazy_names = [name for name, x in _tensors(model) if is_lazy(x)]
    if lazy_names:
        raise UsageError(
            f"ht.torch.sync: '{lazy_names[0]}' has no shape yet, as {len(lazy_names)} of the "
            "model's lazy tensors: run one forward pass first, and make the optimizer after it"
        )
    if not trained_parameters(model):
        raise UsageError("ht.torch.sync: expected parameters with requires_grad, seen none")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "ht.torch.sync: SparseAdam takes sparse gradients alone, and their sums are dense: "
            "take torch.optim.Adam, and sparse=False in each Embedding"
        )
    if unknown := [p for p in _params(optimizer) if p.requires_grad and id(p) not in shared_ids]:
        raise UsageError(
            f"ht.torch.sync: the optimizer holds {counted(len(unknown), 'parameter')} that the "
            "model does not have, whose gradients would not be summed; build it with "
            "model.parameters(), and add layers to the model before the optimizer"
        )


def must_train_alike(world: World, parameters: Parameters) -> None:
    """Raise UsageError on all ranks, naming a difference, unless ranks train the same parameters.

    Collective: one message of 32 bytes, and names only where they differ.
    """
    layout = [[name, list(p.shape), str(p.dtype)] for name, p in parameters.items()]
    text = json.dumps(layout)
    if is_equal(world.link, text):
        return
    layout_texts = world.gather(text)
    first_layout = json.loads(layout_texts[0])
    fault_texts = [
        f"rank {rank} {_describe_difference(first_layout, json.loads(other))}"
        for rank, other in enumerate(layout_texts)
        if other != layout_texts[0]
    ]
    raise UsageError(
        "ht.torch.sync: the trained parameters must be the same on all ranks; beside rank 0, "
        f"{'; '.join(fault_texts[:8])}: freeze, unfreeze, add and replace layers on all ranks alike"
    )


def _describe_difference(first_layout: list[object], other_layout: list[object]) -> str:
    added_rows = [row for row in other_layout if row not in first_layout]
    missing_rows = [row for row in first_layout if row not in other_layout]
    difference_texts = [f"also trains {_describe_parameter(row)}" for row in added_rows[:1]]
    difference_texts += [f"does not train {_describe_parameter(row)}" for row in missing_rows[:1]]
    return " and ".join(difference_texts) or "has them in another order"


def _describe_parameter(row: object) -> str:
    assert isinstance(row, list)
    return f"'{row[0]}' {tuple(row[1])} of {row[2]}"


def warn_of_sparse(world: World, model: torch.nn.Module) -> None:
    """Say on rank 0 that sparse gradients become dense."""
    kinds = torch.nn.Embedding | torch.nn.EmbeddingBag
    sparse = [n for n, m in model.named_modules() if isinstance(m, kinds) and m.sparse]
    if sparse and world.rank == 0:
        log.warning(
            "ht.torch.sync: '%s' has sparse gradients; their sums are dense, in memory of the "
            "whole table", sparse[0],
        )  # fmt: skip


def _params(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [p for group in groups for p in group["params"]]


def _tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
