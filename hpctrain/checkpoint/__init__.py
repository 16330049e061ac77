"""Saving the state of a run so that it survives a kill at any moment, and finding it again."""

from hpctrain.checkpoint.folder import SavedCheckpoint, best_metric, listing, ranked, value_of
from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.store import (
    Loaded,
    best_value,
    is_checkpoint,
    load,
    read,
    save,
    sweep,
    verify,
)

__all__ = [
    "Loaded",
    "Piece",
    "SavedCheckpoint",
    "best_metric",
    "best_value",
    "is_checkpoint",
    "listing",
    "load",
    "ranked",
    "read",
    "save",
    "sweep",
    "value_of",
    "verify",
]
