"""Saving the state of a run so that it survives a kill at any moment, and finding it again."""

from hpctrain.checkpoint.folder import Found, kept_best, listing, ranked, value_of
from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.store import (
    Loaded,
    best_value,
    is_one,
    load,
    read,
    save,
    sweep,
    verify,
)

__all__ = ["Found", "Loaded", "Piece", "best_value", "is_one", "kept_best", "listing", "load",
           "ranked", "read", "save", "sweep", "value_of", "verify"]  # fmt: skip
