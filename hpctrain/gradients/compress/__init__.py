"""Compression: gradients are sent in fewer bytes, with any all-reduce.

    none      | 32 bits of every element                        |
    bf16      | 16 bits of every element    |                     rounded, each hop adds in float32
    fp16      | 16 bits of every element    |                     and a power of two per bucket
    top-k     | the largest  |                                    the rest is kept for the next step
    powersgd  | P | Q |                                           the rest is kept for the next step

Other parts of a step do not change: after the all-reduce the bucket holds a sum in its own dtype,
the same bytes on every rank. The last two methods keep a part of the gradient back, the *residual*,
and add it to the next gradient, so that it is delayed but not lost (error feedback). The residual
lies in a plane with the layout of the arena, and is part of checkpoints. See the file of each
method for its equations and source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain.collectives import AllReduceFunction, Group, Operation
from hpctrain.core import config
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fetch, namespace
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.compress.half_precision import Bfloat16, Float16
from hpctrain.gradients.compress.powersgd import PowerSgd
from hpctrain.gradients.compress.top_k import TopK, require_smaller_message

#: {algorithm: methods it does not support}: "null" sends nothing, MPI and NCCL round differently.
UNSUPPORTED_METHODS = {
    "null": ("bf16", "fp16", "top-k", "powersgd"),
    "native": ("bf16", "fp16"),
    "nccl": ("bf16", "fp16"),
}
#: {key: the only method that it applies to}.
METHOD_OF_KEY = {"compression_ratio": "top-k", "compression_rank": "powersgd"}


@config.options
class CompressionOptions:
    """The keys of `[wire]` for compression."""

    compression: Literal["none", "bf16", "fp16", "top-k", "powersgd"] = "none"
    #: the fraction of each matrix that top-k sends; the default is 0.01
    compression_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: the rank of the matrices that PowerSGD sends; the default is 4
    compression_rank: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for keys of another method, or an algorithm without this method."""
        for key, method in METHOD_OF_KEY.items():
            if getattr(self, key) is not None and self.compression != method:
                raise UsageError(
                    f"[wire] {key}: expected compression = '{method}' beside it, seen "
                    f"'{self.compression}'"
                )
        algorithm = getattr(self, "algorithm", "auto")
        if self.compression in UNSUPPORTED_METHODS.get(algorithm, ()):
            raise UsageError(
                f"[wire] compression: expected an algorithm that supports "
                f"'{self.compression}', seen '{algorithm}'; use algorithm = 'auto'"
            )

    @property
    def ratio(self) -> float:
        """The fraction of each matrix that top-k sends."""
        return self.compression_ratio or 0.01

    def must_fit(self, ranks: int) -> None:
        """Raise UsageError if `ranks` would send more bytes than without compression."""
        if self.compression == "top-k":
            require_smaller_message(self.ratio, ranks)


class Compressor:
    """A compressed all-reduce; all ranks call it in the same order, each from one thread."""

    def __init__(self, method: Bfloat16 | Float16 | TopK | PowerSgd, name: str):
        """Reduce with `method`; `name` is its name in a trace."""
        self.local_state = method.local_state  #: flat arrays by name, different on each rank
        self.shared_state = method.shared_state  #: flat arrays by name, equal on all ranks
        self.__name__ = name
        self._method = method
        #: Each function waits for (min, max) of a sum that is not checked yet
        self._pending_extremes: list[Callable[[], np.ndarray]] = []
        self._planes = [*method.local_state.values(), *method.shared_state.values()]
        self._saved_planes = [x.copy() for x in self._planes]

    def __call__(self, group: Group, x: Array, op: Operation) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place; `op` is np.add."""
        with np.errstate(over="ignore", invalid="ignore"):  # sums_are_finite checks each sum
            self._method(group, x)
        if x.size:
            self._pending_extremes.append(fetch(namespace(x).stack([x.min(), x.max()])))

    def begin(self) -> None:
        """Begin a step: save the arrays that `undo` restores."""
        for x, saved_plane in zip(self._planes, self._saved_planes, strict=True):
            saved_plane[...] = x

    def undo(self) -> None:
        """Restore the residuals and shared arrays from before the step."""
        for x, saved_plane in zip(self._planes, self._saved_planes, strict=True):
            x[...] = saved_plane

    def sums_are_finite(self) -> bool:
        """Return whether all sums since the last call are finite; wait for sums of a device.

        All ranks hold the same sums, so they get the same result without communication.
        """
        pending_fetches, self._pending_extremes = self._pending_extremes, []
        return all(np.isfinite(fetch_extremes()).all() for fetch_extremes in pending_fetches)


def build(
    options: CompressionOptions,
    allreduce: AllReduceFunction,
    arena: Arena,
    ranks: int,
    zeros_like: Callable[[Array], Array],
    has_marks: bool = False,
) -> Compressor | None:
    """Return the compressor for the gradients of `arena`; None if nothing is compressed.

    `zeros_like(x)` allocates memory that neighbours can read; `build` is collective if `zeros_like`
    is. `has_marks`: whether slots without a gradient are marked, see optim/absent.py. Raises
    UsageError if compression would send more bytes than no compression.
    """
    method = options.compression
    methods: dict[str, Callable[[], Bfloat16 | Float16 | TopK | PowerSgd]] = {
        "bf16": lambda: Bfloat16(allreduce, arena, zeros_like),
        "fp16": lambda: Float16(allreduce, arena, zeros_like),
        "top-k": lambda: TopK(allreduce, arena, options.ratio, ranks, has_marks),
        "powersgd": lambda: PowerSgd(allreduce, arena, options.compression_rank or 4, has_marks),
    }
    return None if method == "none" else Compressor(methods[method](), method)
