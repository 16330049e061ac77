"""`DistributedOptimizer`: the optimizer of the user's, with gradients reduced over all ranks.

    loss.backward()      hooks count passes; complete gradients are reduced meanwhile
    optimizer.step()     synchronize(): the other gradients, zeros where there is none; all .grad
                         are reduced; then the step of the user's class

With Adasum the step of the user's class comes first, and ranks reduce the changes of parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch

from hpctrain.horovod.torch import job
from hpctrain.horovod.torch.compression import Compression
from hpctrain.horovod.torch.gradients import (
    Alone,
    Bucket,
    Groups,
    Reduction,
    Watched,
    check_groups,
    choose_operations,
)
from hpctrain.horovod.torch.job import size
from hpctrain.horovod.torch.parameter_names import name_parameters, positions
from hpctrain.horovod.torch.process_sets import ProcessSet, engine_of, global_process_set
from hpctrain.horovod.torch.reductions import allreduce
from hpctrain.horovod.torch.submission import Adasum, Average


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return `optimizer` as an object of a subclass of its class that reduces gradients by `op`.

    It shares state, groups of parameters and hooks with `optimizer`. A parameter that has no
    gradient on this rank counts as zeros. `.grad` are views of memory that the next step uses
    again: clone what you keep.

    `named_parameters`: by whose names ranks match gradients, as `model.named_parameters()`; by
    default positions. `backward_passes_per_step`: passes whose gradients are added up before.
    `gradient_predivide_factor`: part of the division by the number of ranks that comes before the
    sum. `groups`: gradients that are reduced together, as lists of parameters or as a number.
    `sparse_as_dense`: sparse gradients are dense on the way. With op=Adasum the changes of
    parameters are reduced, not the gradients. A closure is called with reduced gradients.

    Raises ValueError for names that are not unique or miss parameters, and for bad options.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    kind: type[_Watching] = _Reducing
    if op == Adasum and size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        if groups is not None or sparse_as_dense:
            warnings.warn("groups and sparse_as_dense have no use with op=hvd.Adasum", stacklevel=2)
        kind = _AdasumStep
    user_class = type(optimizer)
    distributed: Any = object.__new__(type(user_class.__name__, (kind, user_class), {}))
    # A scheduler's wrapper of `step` belongs to the other object.
    vars(distributed).update({k: v for k, v in vars(optimizer).items() if k != "step"})
    factor, number = gradient_predivide_factor, next(_numbers)
    reduction = Reduction(op, process_set, compression, factor, sparse_as_dense, number)
    distributed._watch(named_parameters, backward_passes_per_step, reduction, groups)
    return distributed


_numbers = count()  # all ranks make their optimizers in one order


class _Watching(torch.optim.Optimizer):
    """An optimizer that counts the backward passes of its parameters."""

    def _watch(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        passes: int,
        reduction: Reduction,
        groups: Groups,
    ) -> None:
        named = name_parameters(self.param_groups, named_parameters)
        self._parameter_names = {parameter: name for name, parameter in named}
        self.backward_passes_per_step, self.op = passes, reduction.op
        self.process_set, self._reduction = reduction.process_set, reduction
        self._synchronized, self._should_synchronize = False, True
        self._watched: dict[int, Watched] = {}  # by the identity of the parameter
        self._reduces = bool(reduction.process_set.included()) and size() > 1
        if self._reduces:
            engine_of(reduction.process_set)  # it must be registered
        check_groups(groups)
        self._watch_new(groups)
        job.call_after_loss(self._renew)

    def _watch_new(self, groups: Groups = None) -> None:
        """Watch the parameters that were added, or unfrozen, since."""
        parameters = (p for group in self.param_groups for p in group["params"])
        identities = {id(p) for p in parameters if p.requires_grad and id(p) not in self._watched}
        if not identities or not self._reduces:
            return
        for name, parameter in positions(self.param_groups):
            self._parameter_names.setdefault(parameter, name)
        new = [
            Watched(name, parameter, self.backward_passes_per_step)
            for parameter, name in self._parameter_names.items()
            if id(parameter) in identities
        ]
        self._watched.update((id(watched.parameter), watched) for watched in new)
        self._choose_operations(new, groups)

    def _choose_operations(self, new: list[Watched], groups: Groups) -> None:
        """Give each of `new` its operation."""

    def _operations(self) -> Collection[Bucket | Alone]:
        """Return the operations on gradients, each once."""
        operations = dict.fromkeys(watched.operation for watched in self._watched.values())
        operations.pop(None, None)
        return operations.keys()  # type: ignore[return-value]

    def _restart(self, *, forgets: bool = False) -> None:
        """Begin to count again; `forgets` what is under way."""
        passes = self.backward_passes_per_step
        for watched in self._watched.values():
            watched.passes_left = passes
        for operation in self._operations():
            operation.restart(forgets=forgets)
        self._synchronized = False

    def _renew(self) -> None:
        """Forget gradients and operations under way, after a loss of ranks."""
        self._restart(forgets=True)
        self._should_synchronize = True
        super().zero_grad()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of `passes` backward passes from now on."""
        self.backward_passes_per_step = passes
        self._restart()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of an optimizer of the user's class, and forget gradients under way."""
        self._restart(forgets=True)
        self._should_synchronize = True
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; raise AssertionError while they are reduced, or are to be."""
        passes = self.backward_passes_per_step
        if any(watched.passes_left != passes for watched in self._watched.values()):
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()"
                " or optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none)


class _Reducing(_Watching):
    """An optimizer whose gradients are reduced before its step."""

    def _choose_operations(self, new: list[Watched], groups: Groups) -> None:
        choose_operations(new, self._reduction, groups)

    def synchronize(self) -> None:
        """Let each `.grad` be the reduced gradient; collective.

        Raises HorovodInternalError, as do all ranks, if a reduction failed.
        """
        self._watch_new()
        operations = self._operations()
        try:
            for operation in operations:
                if operation.running is None:
                    operation.begin()
            for operation in operations:
                operation.finish()
        except BaseException:
            self._restart(forgets=True)
            raise
        self._restart()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` take the gradients as they are, after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, and make the step; `closure` is called, then reduced."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to "
                    "consider using optimizer.skip_synchronize() context if you use "
                    "optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            if closure is None:
                self.synchronize()
            else:
                closure = partial(self._call_and_synchronize, closure)
        loss = super().step() if closure is None else super().step(closure)
        self._synchronized = False
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the hooks of the user's class are enough

    def _call_and_synchronize(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        if isinstance(self, torch.optim.LBFGS) and self._reduces:  # it decides by the loss
            return allreduce(loss.detach(), name="loss", process_set=self.process_set)
        return loss


class _AdasumStep(_Watching):
    """An optimizer whose changes of parameters are reduced after its step, by Adasum."""

    def synchronize(self) -> None:
        """Do nothing: gradients are not reduced."""

    def skip_synchronize(self) -> None:
        """Raise AssertionError."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step with this rank's gradients, then reduce the changes; collective."""
        loss = None if closure is None else closure()
        self._watch_new()
        parameters = [watched.parameter.detach() for watched in self._watched.values()]
        for watched in self._watched.values():
            if watched.parameter.grad is None:
                watched.parameter.grad = torch.zeros_like(watched.parameter)
        starts = [parameter.clone() for parameter in parameters]
        super().step()
        compression, running = self._reduction.compression, []
        for watched, start in zip(self._watched.values(), starts, strict=True):
            change, context = compression.compress(watched.parameter.detach() - start)
            name = self._reduction.make_name(f"{watched.name}, its change")
            running.append((self._reduction.begin(change, name, is_async=True), context))
        for parameter, start, (operation, context) in zip(parameters, starts, running, strict=True):
            parameter.copy_(start.add_(compression.decompress(operation.wait(), context)))
        self._restart()
        return loss

    step.hooked = True  # type: ignore[attr-defined]
