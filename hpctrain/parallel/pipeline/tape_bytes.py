"""Bytes of tapes, the activations that a stage keeps from forward to backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from hpctrain import nn
from hpctrain.core.xp import Array
from hpctrain.nn.part import Part
from hpctrain.parallel.pipeline.layer_times import example_input
from hpctrain.parallel.schedules.actions import ActionList
from hpctrain.parallel.schedules.check import LIVE_CHANGES


def tape_bytes(tape: Any, params: Mapping[str, Array]) -> int:
    """Return the bytes of a tape's arrays; parameters belong to the arena.

    The largest view of an array counts: the array may belong to a whole batch.
    """
    bytes_of_owner: dict[int, int] = {}
    for x in _tape_arrays(tape):
        owner = id(_memory_owner(x))
        bytes_of_owner[owner] = max(bytes_of_owner.get(owner, 0), x.nbytes)
    arena_owners = {id(_memory_owner(x)) for x in params.values()}
    return sum(nbytes for owner, nbytes in bytes_of_owner.items() if owner not in arena_owners)


def predict_sample_bytes(
    model: nn.Model, part: Part, params: Mapping[str, Array], samples: int, memory: Array
) -> float:
    """Return the bytes per sample of a tape of `part`, from a forward pass of an example."""
    x = example_input(model, part.start, samples, memory)
    key = nn.Key(seed=0, step=0, first=0, samples=samples)
    return tape_bytes(part.forward(params, x, key)[1], params) / samples


def peak_bytes(actions: ActionList, bytes_by_stage: Mapping[int, float]) -> int:
    """Return the largest sum of live tapes in the list of a rank."""
    changes = (LIVE_CHANGES[op] * bytes_by_stage[stage] for op, stage, _ in actions)
    return round(max(accumulate(changes), default=0))


def _tape_arrays(tree: Any) -> Iterator[Array]:
    """Yield the arrays of a tape: of sequences, mappings, and objects with attributes."""
    if hasattr(tree, "nbytes") and hasattr(tree, "dtype"):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tape_arrays([*tree.values()])
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        for branch in tree:
            yield from _tape_arrays(branch)


def _memory_owner(x: Array) -> Array:
    """Return the array that owns the memory of `x`."""
    while getattr(x, "base", None) is not None and hasattr(x.base, "nbytes"):
        x = x.base
    return x
