"""The state in a checkpoint, as engines request it and save it: any regime resumes from any other.

Where workers trained apart, a checkpoint has no common optimizer state but "worker.0.optimizer.m",
"worker.1.optimizer.m", ...: a request for "optimizer.m" then gets the mean. A regime with more
updates per step has a higher count at the same step: counts are converted.

Ranks save and request pieces. Planes (parameters, moments, residuals) have the offsets of the
model's plane, also where an arena holds only ranges of it. Gaps in front of ranges are not saved.
An array of another length, such as a count of updates, is equal in all arenas of a model: the arena
with the first slot saves it.

    checkpoint         | a a a a b b b b b b c c c |    step
    arena of a and c   | a a a a|0 0 c c c |            saves step
    arena of b         | 0 0 0 0 b b b b b b |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpctrain.checkpoint import Piece, Reader
from hpctrain.collectives.chunks import bounds
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import copy, namespace, to_host
from hpctrain.gradients.arena import Arena
from hpctrain.optim.optimizer import BLOCK_ELEMENTS
from hpctrain.transport.link import Link

UPDATE_COUNT = "optimizer.step"  #: names of update counters end so
#: `SavedState.request`, or another method with its arguments
Request = Callable[[str, np.ndarray, int, int], None]
_WORKER_ARRAY = re.compile(r"worker\.([0-9]{1,9})\.(.+)")


class SavedState:
    """The arrays of a checkpoint and the means over its workers; all arrive after `Engine.load`."""

    def __init__(self, reader: Reader, update_ratio: float = 1.0):
        """`update_ratio`: updates per step of this regime over the saved regime's."""
        self._reader, self._ratio = reader, update_ratio
        #: registers a call to make once everything that any rank requested has arrived
        self.on_arrival = reader.on_arrival
        self._means: dict[str, list[str]] = {}  # name: the arrays of all workers
        own_arrays = sorted(
            (int(m[1]), m[2], m[0]) for m in map(_WORKER_ARRAY.fullmatch, reader.sizes) if m
        )
        for _, common_name, name in own_arrays:
            if common_name not in reader.sizes:
                self._means.setdefault(common_name, []).append(name)
        self.sizes = reader.sizes | {
            name: reader.sizes[arrays[0]] for name, arrays in self._means.items()
        }
        #: the number of workers with an optimizer state of their own
        self.workers = sum(common_name == UPDATE_COUNT for _, common_name, _ in own_arrays)

    def own_name(self, name: str, worker: int, workers: int) -> str:
        """Return the name of a worker's own array, of the common one where it has none.

        Of another number of `workers` than was saved, none has.
        """
        own_name = f"worker.{worker}.{name}"
        return own_name if own_name in self.sizes and self.workers == workers else name

    def request(self, name: str, out: Any, offset: int = 0, size: int | None = None) -> None:
        """Request the elements of `name` from `offset` on that fill flat `out`.

        Raises UsageError unless the whole array has `size` elements, by default `out.size`.
        """
        expected_size, actual_size = (
            out.size if size is None else size,
            self.sizes.get(name, "none"),
        )
        if actual_size != expected_size:
            raise UsageError(
                f"the checkpoint does not fit the recipe: expected {expected_size} numbers of "
                f"'{name}', seen {actual_size}; resume with the model and the optimizer of the "
                "checkpoint"
            )
        sources = self._means.get(name, [name])
        for turn, source in enumerate(sources):
            self._reader.request(source, out, offset, turn)
        if len(sources) > 1:
            self.on_arrival(partial(divide, out, len(sources)))
        ratio = self._ratio
        if name.endswith(UPDATE_COUNT) and ratio != 1:
            self.on_arrival(lambda: copy(out, np.rint(to_host(out) * ratio)))

    def request_sum(self, name: str, out: Any, offset: int, size: int) -> None:
        """Request elements, from `offset` on, of the sum over the parts of `name`, `size` long."""
        for turn in range(self.sizes[name] // size):
            self._reader.request(name, out, turn * size + offset, turn)

    def request_deferred(
        self, name: str, out: Any, offset: int = 0, size: int | None = None
    ) -> None:
        """Request an array that not every checkpoint has: `out` changes after all has arrived.

        If this checkpoint is damaged and an older one lacks the array, `out` keeps its values.
        """
        arrived = namespace(out).empty_like(out)
        self.request(name, arrived, offset, size)
        self.on_arrival(partial(copy, out, arrived))


def divide(x: Any, n: int) -> None:
    """Divide `x` by `n` in place, integers rounded down."""
    if np.issubdtype(x.dtype, np.integer):
        x //= n
    else:
        x /= n


def pieces_of(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], rank: int, size: int
) -> list[Piece]:
    """Return the 1/P that `rank` saves of a state that every rank holds in full."""
    named_arrays = _flat_arrays(arena, optimizer_state)
    return [
        piece
        for name, x in named_arrays.items()
        for piece in array_pieces(arena, name, x, rank, size)
    ]


def request_state(
    arena: Arena, optimizer_state: Mapping[str, np.ndarray], saved: SavedState
) -> None:
    """Request the planes and the optimizer's state of a checkpoint, as far as the arena has them.

    Raises UsageError for a checkpoint of another model or optimizer.
    """
    for name, x in _flat_arrays(arena, optimizer_state).items():
        request_array(arena, name, x, saved.request)


def _flat_arrays(arena: Arena, optimizer_state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
    common_pieces = pieces_of(arena, {}, link.rank, link.size)
    return common_pieces + optimizer_pieces(arena, state, start, own_slice)


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
    own_counts = counts[own_slice]
    return (
        [Piece(UPDATE_COUNT, own_slice.start, counts.size, own_counts)] if own_counts.size else []
    )


def request_range(
    arena: Arena, state: Mapping[str, np.ndarray], own_range: slice, saved: SavedState
) -> None:
    """Request the parameters, and range `own_range` of the optimizer's state."""
    request_state(arena, {"step": state["step"]}, saved)
    for name, x in state.items():
        if name != "step":
            request_plane(arena, f"optimizer.{name}", x, saved.request, own_range.start)


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
    arena: Arena, name: str, x: np.ndarray, start: int = 0, *, number: int = 0, count: int = 1
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
    *,
    number: int = 0,
    count: int = 1,
) -> None:
    """Request the elements that `plane_pieces` saves of the same arguments."""
    for piece in plane_pieces(arena, name, x, start, number=number, count=count):
        request(name, piece.array, piece.offset, piece.size)


def _is_plane(arena: Arena, x: np.ndarray) -> bool:
    # The length of a plane is a multiple of a cache line's elements, so that no count has it.
    return x.size == arena.param.size
