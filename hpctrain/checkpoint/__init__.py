"""Saving the state of a run so that it survives a kill at any moment, and finding it again."""

from hpctrain.checkpoint.folder import (
    SavedCheckpoint,
    best_metric,
    listing,
    metric_value,
    rank_by_metric,
)
from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.reader import Reader
from hpctrain.checkpoint.restore import Loaded, best_value, is_checkpoint, load, read, verify
from hpctrain.checkpoint.store import save, sweep

__all__ = [
    "Loaded",
    "Piece",
    "Reader",
    "SavedCheckpoint",
    "best_metric",
    "best_value",
    "is_checkpoint",
    "listing",
    "load",
    "rank_by_metric",
    "read",
    "save",
    "sweep",
    "metric_value",
    "verify",
]
