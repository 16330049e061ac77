"""Saving the state of a run so that it survives a kill at any moment, and finding it again."""

from hpctrain.checkpoint.folder import (
    SavedCheckpoint,
    best_criterion,
    listing,
    metric_value,
    rank_by,
)
from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.memory import MemoryCopies
from hpctrain.checkpoint.memory_reader import MemoryReader, live_state, newest_whole
from hpctrain.checkpoint.requests import Reader
from hpctrain.checkpoint.restore import Loaded, best_value, is_checkpoint, load, read, verify
from hpctrain.checkpoint.store import save, sweep

__all__ = [
    "Loaded",
    "MemoryCopies",
    "MemoryReader",
    "Piece",
    "Reader",
    "SavedCheckpoint",
    "best_criterion",
    "best_value",
    "is_checkpoint",
    "listing",
    "live_state",
    "load",
    "newest_whole",
    "rank_by",
    "read",
    "save",
    "sweep",
    "metric_value",
    "verify",
]
