"""Engines that a campaign may name, as tables of a small recipe; and what each promises."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.tools.chaos.case import BATCH, Table
from hpctrain.training.recipe import Recipe, check

WIRE_KEYS = {
    "algorithm", "bucket_bytes", "overlap", "priority", "compression", "compression_ratio",
    "compression_rank", "reduction", "blocks",
}  # fmt: skip
MAX_RANKS = 5


@dataclass(frozen=True)
class Regime:
    """Tables of a recipe, and the numbers of ranks that they take."""

    tables: Table
    smallest: int = 2
    largest: int = MAX_RANKS


def _regime(kind: str, smallest: int = 2, **keys: object) -> Regime:
    wire = {key: keys.pop(key) for key in list(keys) if key in WIRE_KEYS}
    tables: Table = {"engine": {"kind": kind, **keys}} | ({"wire": wire} if wire else {})
    return Regime(tables, smallest, 1 if kind == "single" else MAX_RANKS)


REGIMES = {
    "single": _regime("single", 1),
    "allreduce": _regime("allreduce"),
    "ring": _regime("allreduce", algorithm="ring"),
    "tree": _regime("allreduce", algorithm="tree"),
    "recursive-doubling": _regime("allreduce", algorithm="recursive-doubling"),
    "halving-doubling": _regime("allreduce", algorithm="halving-doubling"),
    "direct": _regime("allreduce", algorithm="direct"),
    "buckets": _regime("allreduce", algorithm="ring", bucket_bytes=1024, overlap="always"),
    "priority": _regime("allreduce", bucket_bytes=1024, overlap="always", priority=True),
    "shards": _regime("allreduce", shard_optimizer=True),
    "shared": _regime("allreduce", share_parameters=True),
    "ordered": _regime("allreduce", reduction="ordered"),
    "bf16": _regime("allreduce", compression="bf16"),
    "top-k": _regime("allreduce", compression="top-k", compression_ratio=0.1),
    "powersgd": _regime("allreduce", compression="powersgd", compression_rank=2),
    "ps-sync": _regime("ps-sync"),
    "ps-sync, two servers": _regime("ps-sync", 3, servers=2),
    "ps-sync, colocated": _regime("ps-sync", servers=2, placement="colocated"),
    "local-sgd": _regime("local-sgd", period=4),
    "local-sgd, averaged": _regime("local-sgd", period=6, momentum="averaged", start_after=10),
    "local-sgd, outer": _regime("local-sgd", period=5, outer="nesterov"),
    "local-sgd, delayed": _regime("local-sgd", period=6, delay=2),
    "gossip, ring": _regime("gossip", graph="ring"),
    "gossip, exponential": _regime("gossip", graph="exponential"),
    "ps-sync, backup": _regime("ps-sync", 3, backup_workers=1),
    "ps-async": _regime("ps-async"),
    "ps-async, bounded": _regime("ps-async", 3, staleness=1),
    "ps-async, softsync": _regime("ps-async", 3, softsync=1),
    "ps-async, compensated": _regime("ps-async", 3, delay_compensation=0.1, servers=2),
    "ps-async, colocated": _regime("ps-async", servers=2, placement="colocated"),
    "ps-async, seldom": _regime("ps-async", 3, push_every=2, pull_every=4),
    "easgd": _regime("easgd", period=4),
    "easgd, two servers": _regime("easgd", 4, period=3, servers=2),
    "gossip": _regime("gossip"),
}
#: Optimizers and periods: of few kinds, since each needs a run without faults to compare with.
SETTINGS: list[Table] = [
    {
        "run": {"steps": 80, "interval_steps": 7},
        "optimizer": {"kind": "sgd", "rate": 0.05, "momentum": 0.9, "batch": BATCH},
        "checkpoint": {"every_steps": 15, "keep": 3},
    },
    {
        "run": {"steps": 70, "interval_steps": 10},
        "optimizer": {"kind": "adamw", "rate": 0.005, "batch": BATCH},
        "checkpoint": {"every_steps": 9, "keep": 2, "keep_best": "test_loss"},
    },
]
PLAIN_SGD = {"ps-async, compensated", "ps-async, seldom"}  #: take no momentum
STEP_MS = 4.0


def make_recipe(name: str, setting: int) -> Table:
    """Return the small recipe of regime `name`, with one of SETTINGS; it has no `[data]`."""
    tables = SETTINGS[0 if name in PLAIN_SGD else setting % len(SETTINGS)]
    recipe = {"schema": 1, **tables, **REGIMES[name].tables}
    recipe["run"] = {"name": "campaign", **tables["run"]}
    recipe["model"] = {"kind": "mlp", "widths": [64, 16, 10]}
    recipe["faults"] = {"step_ms": STEP_MS}
    if name in PLAIN_SGD:
        recipe["optimizer"] = {**tables["optimizer"], "momentum": 0.0}
    return recipe


def is_deterministic(recipe: Table) -> bool:
    """Return whether a run on the same ranks has the same parameters; others are replayed."""
    engine = recipe.get("engine", {})
    kind = engine.get("kind", "allreduce")
    if kind == "gossip":
        return engine.get("graph", "bipartite") != "bipartite"
    return kind not in ("ps-async", "easgd") and not engine.get("backup_workers")


def fits(recipe: Table, ranks: int) -> bool:
    """Return whether `ranks` can train a recipe, or go on with it after a loss."""
    if ranks < recipe.get("elastic", {}).get("min_ranks", 1):
        return False
    try:
        return can_train(check({"data": {"kind": "digits"}, **recipe}), ranks)
    except UsageError:
        return False


def can_train(spec: Recipe, ranks: int) -> bool:
    """Return whether `ranks` can train a recipe that was checked."""
    try:
        spec.must_fit(ranks)
    except UsageError:
        return False
    return True


def is_ordered(recipe: Table) -> bool:
    """Return whether parameters do not depend on the number of ranks."""
    return recipe.get("wire", {}).get("reduction") == "ordered"


def has_shards(recipe: Table) -> bool:
    """Return whether a rank holds state that no other holds: survivors go back to a copy of it."""
    engine, wire = recipe.get("engine", {}), recipe.get("wire", {})
    return (
        engine.get("kind", "allreduce") not in ("single", "allreduce")
        or engine.get("shard_optimizer", False)
        or engine.get("share_parameters", False)
        or wire.get("compression", "none") != "none"
        or wire.get("priority", False)
    )
