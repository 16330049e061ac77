"""The gradients of a loop of the user's own, in one plane per dtype, and their sums.

.grad by autograd  --/ P-->  plane, all parameters of a dtype  --buckets-->  mean over ranks
        |
        local: kept until all ranks have the mean, if ranks survive the loss of others
"""

from __future__ import annotations

import torch

from hpctrain.core import xp
from hpctrain.core.errors import UsageError
from hpctrain.engines.synchronous import overlap as overlapping
from hpctrain.gradients.arena import Arena, lay_out
from hpctrain.gradients.reducer import Reducer, WireOptions
from hpctrain.torch.modules.inputs import as_tensor
from hpctrain.torch.tensors import numpy_dtype
from hpctrain.tuning.select import find_allreduce
from hpctrain.world import World

Parameters = dict[str, torch.nn.Parameter]


class GradientPlane:
    """The gradients of all parameters of one dtype, in memory that neighbours read."""

    def __init__(self, world: World, parameters: Parameters, options: WireOptions):
        """Allocate the plane and start its reducer; collective."""
        self._parameters, self._options = parameters, options
        #: The gradients of this rank that were taken, to be summed again after a loss of ranks.
        self.local: dict[str, torch.Tensor | None] = {}
        self.build(world)

    def build(self, world: World) -> None:
        """Allocate the plane for the ranks of `world` and take the `local` gradients; collective.

        After a loss, plane and reducer of before must not be used any more.
        """
        parameters, options = self._parameters, self._options
        like = next(iter(parameters.values()))
        dtype = numpy_dtype(like.dtype)
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        slots, length = lay_out(shapes, dtype.itemsize)
        memory = world.memory
        on_gpu = like.is_cuda
        grad = memory.zeros_like(xp.zeros(length, dtype)) if on_gpu else memory.zeros(length, dtype)
        arena = Arena(slots, grad, grad)
        concurrent = overlapping.uses_thread(world, options)
        wire = world.group_for("wire", alone=not concurrent)
        buckets = overlapping.choose_buckets(arena, wire, options, concurrent)
        allreduce = find_allreduce(options.algorithm)
        self.reducer = Reducer(grad, buckets, wire, allreduce, concurrent, world.trace)
        flat = as_tensor(grad)
        self._views = {s.name: flat[s.offset : s.stop].view(s.shape) for s in slots}
        self._factor, self._keeps_local = 1 / world.size, world.survives
        self._untaken = set(parameters)
        for name, gradient in list(self.local.items()):
            parameters[name].grad = gradient
            self.take(name)
        if self.local:  # of a whole backward pass
            self._untaken = set(parameters)

    def take(self, name: str) -> None:
        """Copy the gradient of a parameter into the plane, divided by the number of ranks."""
        parameter, view = self._parameters[name], self._views[name]
        grad = parameter.grad
        if self._keeps_local:
            lies_here = grad is not None and grad.data_ptr() == view.data_ptr()
            self.local[name] = grad.clone() if lies_here else grad
        if grad is None:
            view.zero_()
        elif grad.is_sparse:
            raise UsageError(
                f"ht.torch.sync: expected dense gradients, seen a sparse one of '{name}'; build "
                "the Embedding with sparse=False"
            )
        else:
            torch.mul(grad, self._factor, out=view)
        parameter.grad = view
        self._untaken.discard(name)
        self.reducer.mark_ready(name)

    def take_remaining(self) -> None:
        """Take the gradients of parameters that the loss did not depend on; then begin anew."""
        for name in [name for name in self._parameters if name in self._untaken]:
            self.take(name)
        self._untaken = set(self._parameters)
