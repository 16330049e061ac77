"""A model split over the ranks of a pipe axis: a Replica whose gradient is a pipeline's step.

    pipe rank     0                  1                  2
    arena         slots of stage 0   slots of stage 1   slots of stage 2     ranges of one layout
    gradient()    F0 F1 F2 .  .      .  F0 F1 B0 ..     ...                  see execution.py
    Sums          <----------------- sent to all -----  from the last stage

Engines train it over the data axis like any other Replica: the engine of a rank sums and updates
the slots of the stages of this rank. `on_ready` is called after the last product of a slot, so that
sums over the data axis overlap with the rest of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.collectives import broadcast
from hpctrain.core import xp
from hpctrain.core.trees import map_arrays, sample_count
from hpctrain.core.xp import Array
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.replica import Batch, split_batch
from hpctrain.parallel.actions import Action, PipelineSchedule
from hpctrain.parallel.execution import MicroBatch, Operation, TrainingStep, route, run_actions
from hpctrain.parallel.messages import Message, inbound
from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.forward import forward_only
from hpctrain.parallel.stage_link import StageLink
from hpctrain.parallel.stages import StagePlan
from hpctrain.parallel.tied_weights import TiedWeights
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.world import World

Wait = Callable[[], AbstractContextManager[Any]]


class PipelineReplica:
    """A Replica of which this rank holds some stages; the calls are collective over the pipe."""

    def __init__(
        self,
        model: nn.Model,
        seed: int,
        dtype: np.typing.DTypeLike,
        on_gpu: bool,
        pipe: World,
        plan: StagePlan,
        schedule: str,
    ):
        """Create the arena of this rank's stages, with the initial values that one rank has.

        `pipe`: the World of the ranks that hold this replica.
        """
        self.model, self.loss, self.plan, self.schedule = model, model.loss, plan, schedule
        self.micro_batches = 1  #: of a step
        self.wait: Wait = nullcontext  #: encloses each wait for a stage on another rank
        self.peak_tapes = 0  #: the largest number of tapes of stages that lived at one time
        self._pipe, self._rank, self._link = pipe, pipe.rank, pipe.link_for("stages")
        self._parts = {s: plan.part(model, s) for s in plan.stages_of(pipe.rank)}
        names = plan.owned_names(model, pipe.rank)
        shapes = {name: p.shape for name, p in model.parameters.items()}
        zeros = xp.zeros if on_gpu else aligned_zeros
        self.arena = arenas.make_arena(shapes, dtype, {}, zeros, own=names)
        self._tied = TiedWeights(self._link, plan, model, self.arena.param)
        self._bind_views()
        for name, values in nn.initial_values(model.parameters, seed, names).items():
            xp.copy(self._params[name], values)

    @property
    def normalizes_batch(self) -> bool:
        """False: such a model is refused."""
        return False

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other stages."""
        return self._link.bytes_sent

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient of this rank's stages into the arena; see Replica."""
        pieces = [
            MicroBatch(piece, key._replace(first=key.first + first))
            for piece, first in split_batch(batch, self.micro_batches)
        ]
        sums = {
            stage: nn.GradientSums(part, self._grads, len(pieces), on_ready)
            for stage, part in self._parts.items()
        }
        step = TrainingStep(self.model, self._parts, self._params, sums, pieces, scale)
        schedule = make_cached(self.schedule, self._pipe.size, len(pieces), self.plan.stages)
        self._run(schedule, step.operations, [piece.batch.n for piece in pieces])
        self._tied.reduce(sums, self._params)
        self._tied.wait()
        self.peak_tapes = max(self.peak_tapes, step.peak_tapes)
        return self._share_sums(step.losses)

    def evaluate(self, batch: Batch) -> nn.Sums:
        """Return the sums over `batch`, in the pieces of one rank; see Replica."""
        losses: list[nn.PendingSums] = []
        bounds = self.model.evaluation_bounds(sample_count(batch.inputs))

        def evaluate_piece(y: Array, micro: int) -> None:
            targets = batch.part(*bounds[micro]).targets
            losses.append(self.model.loss_sums(y, targets))

        self._forward(batch.inputs, bounds, evaluate_piece)
        return self._share_sums(losses)

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...), the same on all ranks of the pipe."""
        n = sample_count(x)
        outputs = np.zeros((n, *self.model.output_shape), self.arena.param.dtype)
        bounds = self.model.evaluation_bounds(n)

        def take(y: Array, micro: int) -> None:
            outputs[slice(*bounds[micro])] = xp.to_host(y)

        self._forward(x, bounds, take)
        broadcast(self._pipe.main, outputs.reshape(-1), self.plan.placement[-1])
        return outputs

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        for name, x in planes.items():
            xp.copy(x, getattr(self.arena, name))
        self.arena = replace(self.arena, **planes)  # type: ignore[arg-type]
        self._bind_views()

    def _forward(
        self, x: Any, bounds: list[tuple[int, int]], take: Callable[[Array, int], None]
    ) -> None:
        """Pass the samples `x` through all stages, in pieces; `take` gets the last outputs."""

        def forward(action: Action, activation: Array | None) -> Array | None:
            _, stage, micro = action
            part = self._parts[stage]
            if part.start == 0:
                piece = map_arrays(lambda array: array[slice(*bounds[micro])], x)
                activation = self.model.prepare_samples(self._params, piece)
            y, _ = part.forward(self._params, activation, None)
            if stage < self.plan.stages - 1:
                return y
            take(y, micro)
            return None

        if bounds:
            schedule = forward_only(self._pipe.size, len(bounds), self.plan.placement)
            self._run(schedule, {"F": forward}, [stop - start for start, stop in bounds])
            self._tied.wait()

    def _run(
        self, schedule: PipelineSchedule, operations: Mapping[str, Operation], samples: list[int]
    ) -> None:
        """Run this rank's actions, on micro-batches of `samples` samples."""
        self._tied.update_copies(self._params)

        def shape_of(message: Message) -> tuple[int, ...]:
            return (samples[message.micro], *self.plan.boundary_shape(self.model, message.boundary))

        link = StageLink(self._link, inbound(schedule, self._rank), shape_of, self.arena.param)
        actions = route(schedule, self._rank)
        run_actions(actions, operations, link, self._rank, self._pipe.trace, self.wait)
        link.close()

    def _share_sums(self, losses: list[nn.PendingSums]) -> nn.Sums:
        """Return the sums of all micro-batches, which the last stage sends to all ranks."""
        terms = self.loss.terms
        total: nn.Sums = reduce(nn.add, map(nn.wait_for_sums, losses), {})
        packed = nn.losses.pack(total, terms)
        broadcast(self._pipe.main, packed, self.plan.placement[-1])
        return nn.losses.unpack(packed, terms)

    def _bind_views(self) -> None:
        """Create the views of all tensors in the planes."""
        self._params = self.arena.views(self.arena.param) | self._tied.copies
        self._grads = self.arena.views(self.arena.grad)
