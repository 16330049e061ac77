"""Collectives on a user's own arrays: `ht.allreduce` and its neighbours."""
