"""Gradients that are reduced by name while backward computes others.

    hook of p      counts the backward passes; after the last one p.grad is ready
    Bucket         p.grad of several parameters -> one flat tensor -> one named all-reduce -> p.grad
    Alone          p.grad -> an operation of its own: sparse, or through a compressor of the user's

Afterwards `.grad` of a bucket's parameters are views of the flat tensor, so that a gradient is
copied once per step. Which parameters share a bucket follows from the arguments of the optimizer
alone, and is a part of the bucket's name: ranks with other buckets are named, not added up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from hpctrain.horovod.torch import job, submission
from hpctrain.horovod.torch.compression import BF16Compressor, FP16Compressor, NoneCompressor
from hpctrain.horovod.torch.movements import sparse_allreduce_async
from hpctrain.horovod.torch.named.requests import ALLREDUCE
from hpctrain.horovod.torch.process_sets import ProcessSet
from hpctrain.horovod.torch.submission import Call, Running, first
from hpctrain.torch.gradient_sync.module_hooks import while_lives

BUCKET_BYTES = 1 << 24
#: Compressors that are a cast, which the copy to a bucket makes.
CASTS = {NoneCompressor: None, FP16Compressor: torch.float16, BF16Compressor: torch.bfloat16}
#: Gradients that are reduced together: a number of parts, or lists of parameters.
Groups: TypeAlias = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(frozen=True)
class Reduction:
    """How an optimizer's gradients are reduced."""

    op: int
    process_set: ProcessSet
    compression: Any
    predivide_factor: float = 1.0
    sparse_as_dense: bool = False
    number: int = 0  #: of the optimizer, in the order of their creation

    def make_name(self, text: str) -> str:
        """Return the name of the operation on the gradient that `text` names."""
        return f"gradient of {text}" if self.number == 0 else f"gradient {self.number} of {text}"

    def begin(self, tensor: torch.Tensor, name: str, *, is_async: bool) -> Running:
        """Begin the all-reduce of `tensor`, in place."""
        call = Call(ALLREDUCE, name, self.process_set, is_async)
        factors = 1 / self.predivide_factor, self.predivide_factor
        op = submission.choose_op(None, self.op)
        return submission.allreduce(call, [tensor], op, factors, in_place=True, make_result=first)


class Watched:
    """A parameter whose backward passes are counted, and the operation on its gradient."""

    def __init__(self, name: str, parameter: torch.Tensor, passes: int):
        """Count the backward passes through `parameter` while this object lives."""
        self.name, self.parameter, self.passes_left = name, parameter, passes
        self.operation: Bucket | Alone | None = None
        hook = while_lives(self, Watched.count_pass)
        handle = parameter.register_post_accumulate_grad_hook(hook)
        weakref.finalize(self, handle.remove).atexit = False

    def count_pass(self, _: torch.Tensor) -> None:
        """Count a backward pass; after the last one the gradient may be reduced."""
        if self.passes_left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self.passes_left -= 1
        if self.passes_left == 0 and self.operation is not None:
            self.operation.mark_ready(self)


class Bucket:
    """Gradients of one dtype and device that are reduced in one flat tensor."""

    def __init__(self, members: Sequence[Watched], reduction: Reduction):
        """Reduce the gradients of `members` together."""
        self._members = [(watched.name, watched.parameter) for watched in members]
        self._reduction = reduction
        for watched in members:
            watched.operation = self
        self._name = ""
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []  # parts of the flat tensor
        #: Sparse gradients that are dense in the bucket: dimensions by the place of the parameter.
        self._sparse_dims: dict[int, int] = {}
        self.running: Running | None = None
        self._ready_count = 0

    def restart(self, *, forgets: bool) -> None:
        """Wait for all gradients again; an operation under way may keep the flat tensor."""
        self._ready_count = 0
        if forgets:
            self.running = self._flat = None

    def mark_ready(self, watched: Watched) -> None:
        """Begin the operation after the last gradient, if a thread has a core for it."""
        self._ready_count += 1
        if self._flat is None and not self._reduction.sparse_as_dense:
            gradient = watched.parameter.grad
            if gradient is not None and gradient.is_sparse:
                self._give_away(watched)
        if self._ready_count == len(self._members) > 0 and self.running is None and _has_thread():
            self.begin(is_async=True)

    def _give_away(self, watched: Watched) -> None:
        """Let the gradient of `watched` have an operation of its own."""
        self._members = [member for member in self._members if member[1] is not watched.parameter]
        self._ready_count -= 1
        Alone(watched, self._reduction).mark_ready(watched)

    @torch.no_grad()
    def begin(self, *, is_async: bool = False) -> None:
        """Copy the gradients, zeros where there is none, and begin their all-reduce."""
        if self._flat is None:
            self._flat = self._allocate()
        views, gradients = [], []
        for place, (_, parameter) in enumerate(self._members):
            gradient, view = parameter.grad, self._views[place]
            if gradient is None:
                view.zero_()
            elif gradient is not view:
                if gradient.is_sparse:
                    self._sparse_dims[place] = gradient.sparse_dim()
                    gradient = gradient.to_dense()
                views.append(view)
                gradients.append(gradient)
        if views:
            torch._foreach_copy_(views, gradients)
        self.running = self._reduction.begin(self._flat, self._name, is_async=is_async)

    def _allocate(self) -> torch.Tensor:
        parameters = [parameter for _, parameter in self._members]
        lengths = [parameter.numel() for parameter in parameters]
        cast = CASTS[self._reduction.compression] if parameters[0].is_floating_point() else None
        flat = parameters[0].new_empty(sum(lengths), dtype=cast)
        pairs = zip(flat.split(lengths), parameters, strict=True)
        self._views = [part.view(parameter.shape) for part, parameter in pairs]
        self._name = self._make_name()
        return flat

    def _make_name(self) -> str:
        (name, _), *others = self._members
        if not others:
            return self._reduction.make_name(name)
        layout = str([(name, tuple(parameter.shape)) for name, parameter in self._members])
        digest = blake2b(layout.encode(), digest_size=6).hexdigest()
        return self._reduction.make_name(f"{name} and {len(others)} more ({digest})")

    def finish(self) -> None:
        """Wait for the all-reduce, and give each parameter its gradient."""
        assert self.running is not None
        self.running.wait()
        self.running = None
        for place, (_, parameter) in enumerate(self._members):
            view = self._views[place]
            if view.dtype is not parameter.dtype:
                view = view.to(parameter.dtype)
            if place in self._sparse_dims:
                view = view.to_sparse(self._sparse_dims[place])
            if parameter.grad is not view:
                parameter.grad = view


class Alone:
    """A gradient with an operation of its own: a sparse one, or one that the user compresses."""

    def __init__(self, watched: Watched, reduction: Reduction):
        """Reduce the gradient of `watched`."""
        self._parameter, self._name = watched.parameter, reduction.make_name(watched.name)
        self._reduction, self._sparse_dim = reduction, 0
        watched.operation = self
        self.running: Callable[[], torch.Tensor] | None = None

    def restart(self, *, forgets: bool) -> None:
        """Wait for the gradient again."""
        if forgets:
            self.running = None

    def mark_ready(self, _: Watched) -> None:
        """Begin the operation, if a thread has a core for it."""
        if _has_thread():
            self.begin(is_async=True)

    def begin(self, *, is_async: bool = False) -> None:
        """Begin the reduction of the gradient, zeros if there is none: other ranks may have one."""
        reduction, parameter = self._reduction, self._parameter
        gradient = self._zeros() if parameter.grad is None else parameter.grad.detach()
        if gradient.is_sparse:
            self._sparse_dim = gradient.sparse_dim()
            if not reduction.sparse_as_dense:
                self.running = sparse_allreduce_async(
                    gradient, self._name, reduction.op, reduction.process_set
                )
                return
            gradient = gradient.to_dense()
        tensor, context = reduction.compression.compress(gradient)
        running = reduction.begin(tensor, self._name, is_async=is_async)
        self.running = lambda: reduction.compression.decompress(running.wait(), context)

    def _zeros(self) -> torch.Tensor:
        zeros = torch.zeros_like(self._parameter)
        return zeros.to_sparse(self._sparse_dim) if self._sparse_dim else zeros

    def finish(self) -> None:
        """Wait for the result, and give it to the parameter."""
        assert self.running is not None
        gradient = self.running()
        self.running = None
        if self._sparse_dim and not gradient.is_sparse:
            gradient = gradient.to_sparse(self._sparse_dim)
        self._parameter.grad = gradient


def _has_thread() -> bool:
    """Return whether a thread has a core of its own for operations."""
    return job.state().settings.threaded


def choose_operations(watched: Sequence[Watched], reduction: Reduction, groups: Groups) -> None:
    """Give each of `watched` a bucket, or an operation of its own.

    `groups` share a bucket; by default buckets of BUCKET_BYTES, the last parameters first.
    """
    if reduction.compression not in CASTS:
        for member in watched:
            Alone(member, reduction)
        return
    for group in _group(watched, groups):
        kinds: dict[tuple[torch.dtype, torch.device], list[Watched]] = {}
        for member in group:
            parameter = member.parameter
            kinds.setdefault((parameter.dtype, parameter.device), []).append(member)
        for members in kinds.values():
            Bucket(members, reduction)


def check_groups(groups: Groups) -> None:
    """Raise ValueError unless `groups` is None, a number, or lists of different parameters."""
    if groups is None:
        return
    if not isinstance(groups, list | tuple):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(
                "groups should be a positive integer or a list of list of torch.Tensor."
            )
        return
    parameters = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({*map(id, parameters)}) < len(parameters):
        raise ValueError("A parameter can only appear once in groups.")


def _group(watched: Sequence[Watched], groups: Groups) -> Iterable[Sequence[Watched]]:
    """Return `watched` in groups; parameters that no group has are groups of their own."""
    if groups is None:
        return _cut(watched)
    if isinstance(groups, int):
        bounds = [len(watched) * i // groups for i in range(groups + 1)]
        return [watched[start:stop] for start, stop in pairwise(bounds)]
    numbers = {id(parameter): i for i, group in enumerate(groups) for parameter in group}
    grouped: dict[int, list[Watched]] = {}
    for i, member in enumerate(watched):
        grouped.setdefault(numbers.get(id(member.parameter), -1 - i), []).append(member)
    return list(grouped.values())


def _cut(watched: Sequence[Watched]) -> Iterator[list[Watched]]:
    """Yield parts of at least BUCKET_BYTES, the last parameters first."""
    part: list[Watched] = []
    nbytes = 0
    for member in reversed(watched):
        part.append(member)
        nbytes += member.parameter.nbytes
        if nbytes >= BUCKET_BYTES:
            yield part
            part, nbytes = [], 0
    yield part
