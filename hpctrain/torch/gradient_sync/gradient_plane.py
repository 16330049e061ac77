"""The gradients of a loop of the user's own, in one plane per dtype, and their sums.

.grad by autograd  --/ P-->  plane, all parameters of a dtype  --buckets-->  mean over ranks
        |
        local: kept until all ranks have the mean, if the job survives lost ranks

A gradient that is None is sent as -0.0 in all elements, the neutral element of IEEE addition: a sum
of -0.0 alone is None on all ranks. The first element of a gradient is never -0.0. The plane begins
with flags, sent with the last bucket, so that ranks learn without a message what others noticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.engines.synchronous import overlap as overlapping
from hpctrain.gradients.arena import Arena, lay_out
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.tensors import caller_stream, numpy_dtype, own_stream
from hpctrain.tuning.select import find_allreduce
from hpctrain.world import World

Parameters = dict[str, torch.nn.Parameter]
Gradients = dict[str, torch.Tensor | None]
FLAGS = ""  #: the name of the slot of flags; no parameter has it
#: Flags, counted over ranks: trained parameters that changed; gradients that came after their
#: bucket was sent; a backward pass that failed, or that did not.
CHANGED, LATE, FAILED, WHOLE = range(4)


class Totals(NamedTuple):
    """Counts of the flags over the ranks."""

    changed: int
    late: int
    failed: int
    whole: int


class View(NamedTuple):
    """A parameter's part of the plane: as its gradient, and as real numbers."""

    gradient: torch.Tensor
    reals: torch.Tensor
    first: torch.Tensor  #: the first real number; empty if there is none


class GradientPlane:
    """The gradients of the parameters that share a dtype, in memory that neighbours read."""

    def __init__(self, world: World, parameters: Parameters, options: WireOptions):
        """Allocate the plane and start its reducer; collective."""
        self.parameters, self._options = parameters, options
        #: The gradients of this rank that were taken, to be summed again after a loss of ranks.
        self.local: Gradients = {}
        self._late: dict[str, torch.Tensor] = {}  # contributions after their bucket was sent
        self._flags = [0.0] * len(Totals._fields)
        self._sends_early = True  # until a gradient came late on any rank
        self.build(world)

    def build(self, world: World) -> None:
        """Allocate the plane for the ranks of `world` and send the `local` gradients; collective.

        A loss of ranks invalidates the previous plane and its reducer.
        """
        first_parameter = next(iter(self.parameters.values()))
        with own_stream(first_parameter):
            self._build(world, first_parameter)

    def _build(self, world: World, first_parameter: torch.Tensor) -> None:
        parameters, options = self.parameters, self._options
        dtype = numpy_dtype(first_parameter.dtype)
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        slots, length = lay_out({FLAGS: (len(self._flags),), **shapes}, dtype.itemsize)
        memory = world.memory
        if first_parameter.is_cuda:
            allocate = xp.zeros if memory.gpu is None else memory.gpu.zeros
        else:
            allocate = memory.zeros
        grad = allocate(length, dtype)
        arena = Arena(slots, grad, grad)
        self._is_concurrent = overlapping.uses_thread(world, options)
        self._group = world.threads.group_for("wire", alone=not self._is_concurrent)
        buckets = overlapping.choose_buckets(arena, self._group, options, self._is_concurrent)
        self._reducer = Reducer(
            grad, buckets, self._group, find_allreduce(options.algorithm), self._is_concurrent,
            trace=world.trace,
        )  # fmt: skip
        self._flat = as_tensor(grad)
        self._views = {s.name: _view(self._flat[s.offset : s.stop], s.shape) for s in slots}
        self._factor, self._keeps_local = 1 / world.size, world.job is not None
        self._begin()
        if self.local:  # of a whole backward pass
            for name, gradient in self.local.items():
                self._write_gradient(name, gradient)
            self._send_gradients()

    def close(self) -> None:
        """End the communication thread."""
        self._reducer.close()

    def free(self) -> None:
        """Give back the links of a closed plane; collective."""
        self._group.free()

    def collect_gradient(self, name: str) -> None:
        """Move the gradient of a parameter into the plane, divided by the number of ranks.

        A second gradient of the same backward pass, as of weights that are tied across re-entrant
        checkpoints, is added.
        """
        parameter = self.parameters[name]
        gradient, view = self._dense_gradient(name), self._views[name].gradient
        parameter.grad = None  # its memory is used again by autograd for the next layers
        is_second = name in self._written
        if self._keeps_local:
            self._keep_local(name, gradient, is_second and name not in self._sent)
        if gradient is None:
            self._write_gradient(name, None)
        elif name in self._sent:
            late = self._late.get(name)
            self._late[name] = gradient if late is None else late + gradient
        elif is_second:
            view.add_(gradient, alpha=self._factor)
        else:
            self._write_gradient(name, gradient)
        if self._is_concurrent and self._sends_early and name not in self._sent:
            self._mark_ready(name)

    def _dense_gradient(self, name: str) -> torch.Tensor | None:
        gradient = self.parameters[name].grad
        if gradient is None:
            return None
        if gradient.dtype is not self._flat.dtype:
            raise UsageError(
                f"ht.torch.sync: '{name}' was {self._flat.dtype} and its gradient is "
                f"{gradient.dtype}; convert the module before, or close() and call sync again"
            )
        gradient = gradient.detach()
        return gradient.to_dense() if gradient.layout is not torch.strided else gradient

    def _keep_local(self, name: str, gradient: torch.Tensor | None, adds_to_earlier: bool) -> None:
        if name in self._sent:
            return  # it is kept when late gradients are sent
        earlier_gradient = self.local.get(name) if adds_to_earlier else None
        if gradient is not None and earlier_gradient is not None:
            gradient = gradient + earlier_gradient
        elif gradient is not None and gradient.data_ptr() == self._views[name].gradient.data_ptr():
            gradient = gradient.clone()
        self.local[name] = gradient

    def _write_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        view = self._views[name]
        if gradient is None:
            view.reals.fill_(-0.0)
        else:
            torch.mul(gradient, self._factor, out=view.gradient)
            view.first.add_(0.0)  # -0.0 becomes 0.0
        self._written.add(name)

    def finish(self, *, is_changed: bool = False, has_failed: bool = False) -> None:
        """Collect the gradients of parameters that the loss does not depend on; send the rest.

        `is_changed`: whether this rank trains other parameters than before. `has_failed`: an
        unfinished backward pass; nobody uses its sums.
        """
        for name in self.parameters:
            if name not in self._written:
                self.collect_gradient(name)
        self._flags = [is_changed, bool(self._late), has_failed, not has_failed]
        self._send_gradients()

    def _send_gradients(self) -> None:
        flags = self._views[FLAGS].reals
        flags[: len(self._flags)] = torch.tensor(self._flags, dtype=flags.dtype)
        for name in (FLAGS, *self.parameters):
            if name not in self._sent:
                self._mark_ready(name)

    def _mark_ready(self, name: str) -> None:
        self._sent.add(name)
        with caller_stream(self._flat):
            self._reducer.mark_ready(name)

    def wait(self) -> None:
        """Wait for the sums; collective."""
        with own_stream(self._flat):
            self._reducer.wait()
        self._begin()

    def _begin(self) -> None:
        self._written: set[str] = set()  # names of this backward pass
        self._sent: set[str] = set()

    @property
    def has_sent(self) -> bool:
        """Whether a gradient of this backward pass is on its way."""
        return bool(self._sent)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def drop_gradients(self) -> None:
        """Forget an unfinished backward pass."""
        self._begin()
        self._late, self.local = {}, {}

    def totals(self) -> Totals:
        """Return the counts of the flags, after `wait`."""
        return Totals(*(round(count) for count in self._views[FLAGS].reals[:4].tolist()))

    def send_late(self) -> torch.Tensor:
        """Send the gradients that came late, on all ranks; return the sums before.

        From then on gradients are sent at the end of backward.
        """
        sums = self._flat.clone()
        self._sends_early = False
        self.local = {}
        for name in self.parameters:
            gradient = self._late.get(name)
            self._write_gradient(name, gradient)
            if self._keeps_local:
                self.local[name] = gradient
        self._late, self._flags = {}, [0.0] * len(self._flags)
        self._send_gradients()
        return sums

    def add_sums(self, sums: torch.Tensor) -> None:
        """Add earlier `sums`."""
        self._flat.add_(sums)

    def give_gradients(self) -> None:
        """Let `.grad` of each parameter be its mean, or None if no rank had a gradient."""
        absent_names = set(self._absent_names())
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in absent_names else self._views[name].gradient

    def _absent_names(self) -> Iterable[str]:
        first_numbers = torch.cat([self._views[name].first for name in self.parameters])
        names = [name for name in self.parameters if self._views[name].first.numel()]
        for name, is_zero in zip(names, _is_negative_zero(first_numbers).tolist(), strict=True):
            if is_zero and bool(_is_negative_zero(self._views[name].reals).all()):
                yield name


def _view(flat: torch.Tensor, shape: tuple[int, ...]) -> View:
    reals = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    return View(flat.view(shape), reals, reals[:1])


def _is_negative_zero(reals: torch.Tensor) -> torch.Tensor:
    return (reals == 0) & reals.signbit()
