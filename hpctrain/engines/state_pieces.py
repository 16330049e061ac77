"""The pieces that ranks save of planes and other arrays, and request of a checkpoint.

Planes (parameters, moments, residuals) have the offsets of the model's plane, also where an arena
holds only ranges of it. Gaps in front of ranges are not saved. An array of another length, such as
a count of updates, is equal in all arenas of a model: the arena with the first slot saves it.

    checkpoint         | a a a a b b b b b b c c c |    step
    arena of a and c   | a a a a|0 0 c c c |            saves step
    arena of b         | 0 0 0 0 b b b b b b |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hpctrain.checkpoint import Piece
from hpctrain.collectives.chunks import bounds
from hpctrain.engines.saved_state import UPDATE_COUNT, SavedState
from hpctrain.gradients.arena import Arena
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.transport.link import Link

#: `SavedState.request`, or another method with its arguments
Request = Callable[[str, np.ndarray, int, int], None]


def pieces_of(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], rank: int, size: int
) -> list[Piece]:
    """Return the 1/P that `rank` saves of a state that every rank holds in full."""
    named = _flat(arena, optimizer_state)
    return [
        piece for name, x in named.items() for piece in array_pieces(arena, name, x, rank, size)
    ]


def request_state(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], saved: SavedState
) -> None:
    """Request the planes and the optimizer's state of a checkpoint, as far as the arena has them.

    Raises UsageError for a checkpoint of another model or optimizer.
    """
    for name, x in _flat(arena, optimizer_state).items():
        request_array(arena, name, x, saved.request)


def _flat(arena: Arena, optimizer_state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    buffer = {"buffer": arena.buffer} if arena.buffer.size else {}
    return {
        "param": arena.param,
        **buffer,
        **{f"optimizer.{k}": x for k, x in optimizer_state.items()},
    }


def range_pieces(
    arena: Arena, state: Mapping[str, np.ndarray], start: int, own_slice: slice, link: Link
) -> list[Piece]:
    """Return this rank's part of the common arrays, and elements `own_slice` of its range.

    `state` is the optimizer's state of the range, which begins at element `start` of the planes;
    parameters and step are common to all ranks.
    """
    common = pieces_of(arena, {}, link.rank, link.size)
    return common + optimizer_pieces(arena, state, start, own_slice)


def optimizer_pieces(
    arena: Arena, state: Mapping[str, np.ndarray], start: int, own_slice: slice
) -> list[Piece]:
    """Return elements `own_slice` of the optimizer's state of a range that begins at `start`."""
    first, size = start + own_slice.start, own_slice.stop - own_slice.start
    moments = {f"optimizer.{name}": x[own_slice] for name, x in state.items() if name != "step"}
    pieces = [p for name, x in moments.items() for p in plane_pieces(arena, name, x, first)]
    return pieces + _count_pieces(arena, state["step"], first, size)


def _count_pieces(arena: Arena, counts: np.ndarray, start: int, size: int) -> list[Piece]:
    """Return the counts that a range of the plane saves, if it has `size` elements from `start` on.

    The first range saves the count of all updates. Each range saves the counts of the slots that
    begin in it, where `counts` has them.
    """
    indexes = [0] if start == 0 and size and arena.has_first_slot else []
    if counts.size > 1:
        indexes += [i for i, s in enumerate(arena.layout, 1) if start <= s.offset < start + size]
    own_slice = slice(indexes[0], indexes[-1] + 1) if indexes else slice(0, 0)
    own = counts[own_slice]
    return [Piece(UPDATE_COUNT, own_slice.start, counts.size, own)] if own.size else []


def request_range(
    arena: Arena, state: Mapping[str, np.ndarray], own: slice, saved: SavedState
) -> None:
    """Request the parameters, and range `own` of the optimizer's state."""
    request_state(arena, {"step": state["step"]}, saved)
    for name, x in state.items():
        if name != "step":
            request_plane(arena, f"optimizer.{name}", x, saved.request, own.start)


def array_pieces(arena: Arena, name: str, x: np.ndarray, rank: int, size: int) -> list[Piece]:
    """Return the 1/P that `rank` saves of flat `x`, which every rank of `size` holds in full."""
    start, stop = bounds(x.size, size, BLOCK_ELEMENTS)[rank:][:2]
    if _is_plane(arena, x):
        return plane_pieces(arena, name, x[start:stop], start)
    return [Piece(name, start, x.size, x[start:stop])] if arena.has_first_slot else []


def request_array(arena: Arena, name: str, x: np.ndarray, request: Request) -> None:
    """Request the whole of flat `x`: of a plane the ranges of the arena."""
    if _is_plane(arena, x):
        request_plane(arena, name, x, request)
    else:
        request(name, x, 0, x.size)


def plane_pieces(
    arena: Arena, name: str, x: np.ndarray, start: int = 0, number: int = 0, count: int = 1
) -> list[Piece]:
    """Return the pieces of `x`, which begins at element `start` of the arena's planes.

    The array `name` consists of `count` planes of the model; this plane has number `number`.
    """
    size = arena.model_size
    return [
        Piece(name, number * size + offset, count * size, x[part])
        for offset, part in arena.spans(start, x.size)
    ]


def request_plane(
    arena: Arena,
    name: str,
    x: np.ndarray,
    request: Request,
    start: int = 0,
    number: int = 0,
    count: int = 1,
) -> None:
    """Request the elements that `plane_pieces` saves of the same arguments."""
    for piece in plane_pieces(arena, name, x, start, number, count):
        request(name, piece.array, piece.offset, piece.size)


def _is_plane(arena: Arena, x: np.ndarray) -> bool:
    # The length of a plane is a multiple of a cache line's elements, so that no count has it.
    return x.size == arena.param.size
