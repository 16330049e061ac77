"""Compression: fewer bytes on the wire than the gradient has, by way of any all-reduce.

    none      | 32 bits of every element                        |
    bf16      | 16 bits of every element    |                     rounded, each hop adds in float32
    fp16      | 16 bits of every element    |                     and a power of two per bucket
    top-k     | the largest  |                                    the rest is kept for the next step
    powersgd  | P | Q |                                           the rest is kept for the next step

Everything else of a step stays as it is: the bucket holds a sum in its own dtype afterwards, the
same bytes on every rank. The part that two of the methods keep back is the *residual*: it is added
to the next gradient, so that nothing is lost, only late (error feedback). It lies in a plane of the
arena's layout and is saved with the run. See the file of each method for equations and source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from hpctrain import config
from hpctrain.collectives import AllReduceFunction, Group, Operation
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fetch, namespace
from hpctrain.gradients.arena import Arena
from hpctrain.gradients.compress.half_precision import Bfloat16, Float16
from hpctrain.gradients.compress.powersgd import PowerSgd
from hpctrain.gradients.compress.top_k import TopK, must_send_less

#: Methods that an algorithm cannot carry: it sends nothing, or is not ours and rounds by itself.
REFUSED = {
    "null": ("bf16", "fp16", "top-k", "powersgd"),
    "native": ("bf16", "fp16"),
    "nccl": ("bf16", "fp16"),
}
#: The method of each key.
KEYS = {"compression_ratio": "top-k", "compression_rank": "powersgd"}


@config.options
class CompressionOptions:
    """How gradients are made smaller for the wire."""

    compression: Literal["none", "bf16", "fp16", "top-k", "powersgd"] = "none"
    #: the part of each matrix that top-k sends; 0.01 if not given
    compression_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: the rank of the matrices that PowerSGD sends; 4 if not given
    compression_rank: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        """Refuse keys of another method, and algorithms that cannot carry this one."""
        for key, method in KEYS.items():
            if getattr(self, key) is not None and self.compression != method:
                raise UsageError(
                    f"[wire] {key}: expected compression = '{method}' beside it, seen "
                    f"'{self.compression}'"
                )
        algorithm = getattr(self, "algorithm", "auto")
        if self.compression in REFUSED.get(algorithm, ()):
            raise UsageError(
                f"[wire] compression: expected an algorithm that can carry "
                f"'{self.compression}', seen '{algorithm}'; take algorithm = 'auto'"
            )

    @property
    def ratio(self) -> float:
        """The part of each matrix that top-k sends."""
        return self.compression_ratio or 0.01

    def must_fit(self, ranks: int) -> None:
        """Raise UsageError where `ranks` would send more than without compression."""
        if self.compression == "top-k":
            must_send_less(self.ratio, ranks)


class Compressor:
    """An all-reduce that sends less; called in one order on all ranks, by one thread."""

    def __init__(self, method: Bfloat16 | Float16 | TopK | PowerSgd, name: str):
        """Reduce by `method`; `name` is its name in a trace."""
        self.own = method.own  #: flat arrays by name, different on each rank
        self.shared = method.shared  #: flat arrays by name, equal on all ranks
        self.__name__ = name
        self._method = method
        self._ends: list[Callable[[], np.ndarray]] = []  # of sums that are not checked yet
        self._planes = [*method.own.values(), *method.shared.values()]
        self._before = [x.copy() for x in self._planes]

    def __call__(self, group: Group, x: Array, op: Operation) -> None:
        """Sum flat `x`, a slice of the gradient plane, in place; `op` is np.add."""
        with np.errstate(over="ignore", invalid="ignore"):  # each sum is checked
            self._method(group, x)
        if x.size:
            self._ends.append(fetch(namespace(x).stack([x.min(), x.max()])))

    def begin(self) -> None:
        """Begin a step: from now on `undo` leads back here."""
        for x, before in zip(self._planes, self._before, strict=True):
            before[...] = x

    def undo(self) -> None:
        """Restore the residuals and shared arrays from before the step."""
        for x, before in zip(self._planes, self._before, strict=True):
            x[...] = before

    def finite(self) -> bool:
        """Return whether all sums since the last call were; waits for those of a device.

        All ranks hold the same sums, and so get the same result without a message.
        """
        ends, self._ends = self._ends, []
        return all(np.isfinite(end()).all() for end in ends)


def build(
    options: CompressionOptions,
    allreduce: AllReduceFunction,
    arena: Arena,
    ranks: int,
    zeros_like: Callable[[Array], Array],
) -> Compressor | None:
    """Return the compressor for the gradients of `arena`; None if nothing is compressed.

    Collective if `zeros_like(x)` is, which returns the memory that the wire reads. Raises
    UsageError where more would be sent than without.
    """
    kind = options.compression
    methods: dict[str, Callable[[], Bfloat16 | Float16 | TopK | PowerSgd]] = {
        "bf16": lambda: Bfloat16(allreduce, arena, zeros_like),
        "fp16": lambda: Float16(allreduce, arena, zeros_like),
        "top-k": lambda: TopK(allreduce, arena, options.ratio, ranks),
        "powersgd": lambda: PowerSgd(allreduce, arena, options.compression_rank or 4),
    }
    return None if kind == "none" else Compressor(methods[kind](), kind)
