"""The state of compression as pieces of a checkpoint, and the message for a sum not finite.

    compression.residual      | rank 0's plane | rank 1's plane | ... | rank P-1's plane |
    compression.powersgd_q    equal on all ranks: each saves 1/P

A residual is the part of gradients that was not sent yet. The same number of ranks load each its
own, and the run continues bit for bit. Of another number each loads 1/P of the sum, which
stays the same, also for another method with residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy
from hpctrain.engines.engine import piece_of
from hpctrain.gradients.compress import Compressor

log = logging.getLogger(__name__)
PREFIX = "compression."


def sum_fault(compressor: Compressor | None) -> str:
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


def load(
    compressor: Compressor | None, arrays: Mapping[str, np.ndarray], rank: int, size: int
) -> None:
    """Load this rank's arrays; those not saved, or of another PowerSGD rank, stay."""
    own = compressor.local_state if compressor else {}
    shared = compressor.shared_state if compressor else {}
    for name, x in own.items():
        if PREFIX + name in arrays:
            copy(x, _residual_of(arrays[PREFIX + name], x.size, rank, size))
    for name, x in shared.items():
        if arrays.get(PREFIX + name, x[:0]).size == x.size:
            copy(x, arrays[PREFIX + name])
    if rank == 0 and PREFIX + "residual" in arrays and "residual" not in own:
        log.warning("the gradients that compression kept back before the checkpoint are dropped")


def _residual_of(saved: np.ndarray, length: int, rank: int, size: int) -> np.ndarray:
    """Return this rank's residual from the residuals of all ranks in the checkpoint."""
    if saved.size % length:
        raise UsageError(
            f"the checkpoint does not fit the recipe: expected residuals of {length} numbers, "
            f"seen {saved.size} in all; resume with the model of the checkpoint"
        )
    rows: np.ndarray = saved.reshape(-1, length)
    return rows[rank] if len(rows) == size else rows.sum(axis=0) / size
