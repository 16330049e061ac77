"""Saving the state of a run so that it survives a kill at any moment, and finding it again."""

from hpctrain.checkpoint.format import Piece
from hpctrain.checkpoint.store import Found, Loaded, listing, load, save, verify

__all__ = ["Found", "Loaded", "Piece", "listing", "load", "save", "verify"]
