"""The state of compression as pieces of a checkpoint, and the message for a sum not finite.

    compression.residual      | rank 0's plane | rank 1's plane | ... | rank P-1's plane |
    compression.powersgd_q    equal on all ranks: each saves 1/P

A residual is the part of gradients that was not sent yet. The same number of ranks load each its
own, and the run continues bit for bit. Of another number each loads 1/P of the sum, which
stays the same, also for another method with residuals.
"""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.errors import UsageError
from hpctrain.engines.engine import piece_of
from hpctrain.engines.saved_state import SavedState, divide
from hpctrain.gradients.compress import Compressor

log = logging.getLogger(__name__)
PREFIX = "compression."


def find_sum_fault(compressor: Compressor | None) -> str:
    """Return the fault of finite gradients whose compressed sum is not finite."""
    name = compressor.__name__ if compressor else "none"
    return f"the sum of gradients, with [wire] compression = '{name}', is not finite"


def pieces(compressor: Compressor | None, rank: int, size: int) -> list[Piece]:
    """Return this rank's own arrays, and its 1/P of the common ones."""
    if compressor is None:
        return []
    own = [
        Piece(PREFIX + name, rank * x.size, size * x.size, x)
        for name, x in compressor.local_state.items()
    ]
    shared = [piece_of(PREFIX + name, x, rank, size) for name, x in compressor.shared_state.items()]
    return own + shared


def load(compressor: Compressor | None, saved: SavedState, rank: int, size: int) -> None:
    """Request this rank's arrays; those of another PowerSGD rank stay as they are."""
    own = compressor.local_state if compressor else {}
    shared = compressor.shared_state if compressor else {}
    for name, x in own.items():
        if PREFIX + name in saved.sizes:
            _request_residual(x, PREFIX + name, saved, rank, size)
        else:
            x[...] = 0
    for name, x in shared.items():
        if saved.sizes.get(PREFIX + name) == x.size:
            saved.request_deferred(PREFIX + name, x)
    if rank == 0 and PREFIX + "residual" in saved.sizes and "residual" not in own:
        log.warning("the gradients that compression kept back before the checkpoint are dropped")


def _request_residual(x: np.ndarray, name: str, saved: SavedState, rank: int, size: int) -> None:
    """Request this rank's residual `x` of the residuals of all ranks in the checkpoint."""
    total = saved.sizes[name]
    if total % x.size:
        raise UsageError(
            f"the checkpoint does not fit the recipe: expected residuals of {x.size} numbers, "
            f"seen {total} in all; resume with the model of the checkpoint"
        )
    if total == size * x.size:
        saved.request(name, x, rank * x.size, total)
    else:
        saved.request_sum(name, x, total // x.size)
        saved.on_arrival(partial(divide, x, size))
