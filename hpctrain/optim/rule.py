"""Elementwise rules of optimizers, each written once for the host and for a device.

    host      block by block, so that w, m, v, g and the scratch stay in the second-level cache
    device    one kernel by cupy.fuse for all elements, or for each slot

A rule is a function `rule(xp, *arrays, *numbers, *scratch, parts=...)` that writes some of the
arrays in place. On the host it computes in one scratch array of their length, without temporaries,
and `parts` are the slices that decay; a fused kernel takes neither, and does not know its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from hpctrain.core.config import OptionsError, options
from hpctrain.core.errors import UsageError
from hpctrain.core.xp import Array, fused, on_device
from hpctrain.optim.norms import (
    BlockPiece,
    clip_factor,
    find_decaying,
    is_vector,
    pieces,
    slot_pieces,
)
from hpctrain.optim.optimizer import (
    BLOCK_ELEMENTS,
    GatherRows,
    Optimizer,
    PositiveFloat,
    Schedule,
    State,
    TensorSlot,
    blocks,
    initial_state,
    planes,
    rate_at,
)

Parts = Sequence[slice]


class Step(NamedTuple):
    """One update of an optimizer: its numbers, and the arrays on which its rule runs."""

    number: int  #: of the update, from 1
    rate: float
    clip: float  #: factor of the gradient, 1 without clipping
    arrays: Sequence[Array]  #: parameters, planes of the state by name, gradient
    slots: Sequence[TensorSlot]
    gather_rows: GatherRows
    scratch: Sequence[Array]  #: one array of a block's length on the host, none on a device

    def spans(
        self, weight_decay: float, *, exempt_vectors: bool
    ) -> Iterator[tuple[slice, float, Parts | None]]:
        """Return (elements, decay, parts) for each call of a rule.

        `parts`: the parts of the elements that decay, on the host; None: all. On a device vectors
        are exempt by calls per slot, which leave out the gaps between slots.
        """
        size, exempts = self.arrays[0].size, exempt_vectors and weight_decay > 0
        if exempts and not self.scratch:
            decays = [weight_decay * (not is_vector(slot)) for slot in self.slots]
            return ((elements, decays[i], None) for i, elements in self.pieces())
        ranges = blocks(size) if self.scratch else [slice(0, size)]
        same_parts = repeat(None if weight_decay else ())
        all_parts = find_decaying(size, tuple(self.slots)) if exempts else same_parts
        return zip(ranges, repeat(weight_decay), all_parts, strict=False)

    def pieces(self) -> Iterator[BlockPiece]:
        """Yield the elements of each slot: block by block, or for a kernel all at once."""
        return (pieces if self.scratch else slot_pieces)(self.arrays[0].size, self.slots)

    def apply(
        self,
        rule: Callable[..., None],
        elements: slice,
        parts: Parts | None,
        numbers: tuple[float, ...],
    ) -> None:
        """Run `rule` on `elements` of the arrays, of which `parts` decay, with `numbers`."""
        views = [x[elements] for x in self.arrays]
        if self.scratch:
            rule(np, *views, *numbers, self.scratch[0][: views[0].size], parts=parts)
        else:
            fused(rule, views[0])(*views, *numbers)


def decaying(parts: Parts | None, *arrays: Array) -> Sequence[Sequence[Array]]:
    """Return the views of `arrays` to which weight decay applies, part by part."""
    return (arrays,) if parts is None else [[x[part] for x in arrays] for part in parts]


@options
class CommonOptions:
    """Options of every optimizer: the rate, and the maximum norm of the whole gradient."""

    rate: PositiveFloat
    clip_norm: PositiveFloat | None = None


def assemble(
    run: Callable[[Step], None],
    rate: float | Schedule,
    clip_norm: float | None,
    names: Sequence[str],
    *,
    needs_norms: bool = False,
) -> Optimizer:
    """Return the optimizer with planes `names` whose updates `run` does, after clipping."""
    init, update = partial(initial_state, names=names), partial(_update, run, rate, clip_norm)
    return Optimizer(init, update, rate, needs_norms or clip_norm is not None)


def _update(
    run: Callable[[Step], None],
    schedule: float | Schedule,
    clip_norm: float | None,
    grad: Array,
    state: State,
    param: Array,
    slots: Sequence[TensorSlot],
    gather_rows: GatherRows,
) -> None:
    updates = int(state["step"][0])
    rate, clip = rate_at(schedule, updates), clip_factor(grad, clip_norm, slots, gather_rows)
    # Allocated in each call: ranks that are threads would share a scratch kept between calls.
    scratch = [] if on_device(param) else [np.empty(min(BLOCK_ELEMENTS, param.size), param.dtype)]
    arrays = [param, *(state[name] for name in sorted(planes(state))), grad]
    run(Step(updates + 1, rate, clip, arrays, slots, gather_rows, scratch))
    state["step"] += 1


def build(kind: Any, name: str, rate: float | Schedule, **values: Any) -> Optimizer:
    """Return the optimizer of the options class `kind`; raise UsageError, as of `name`.

    `rate` is a number or a function of the 0-based step.
    """
    try:  # options need a number as their rate, which only recipes use
        optimizer: Optimizer = kind(rate=1.0, **values).build(rate)
        return optimizer
    except OptionsError as error:
        raise UsageError(error.text(name)) from None
