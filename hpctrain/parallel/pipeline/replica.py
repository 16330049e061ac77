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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, reduce
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np

from hpctrain import nn
from hpctrain.collectives import all_gather_bytes, broadcast
from hpctrain.core import xp
from hpctrain.core.trees import map_arrays, sample_count
from hpctrain.core.xp import Array
from hpctrain.gradients import arena as arenas
from hpctrain.gradients.replica import Batch, Bytes, Memory, mean_factor, split_batch
from hpctrain.nn.metrics.metric import Observer
from hpctrain.nn.part import GradientSums
from hpctrain.optim.norms import ordered_rows
from hpctrain.parallel.pipeline.execution import (
    MicroBatch,
    Operation,
    Program,
    TrainingStep,
    route,
    run_actions,
)
from hpctrain.parallel.pipeline.stage_link import StageLink, message_bytes
from hpctrain.parallel.pipeline.stages import StagePlan
from hpctrain.parallel.pipeline.tape_bytes import peak_bytes, predict_sample_bytes
from hpctrain.parallel.pipeline.tied_weights import TiedWeights
from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.actions import Action, PipelineSchedule
from hpctrain.parallel.schedules.check import check
from hpctrain.parallel.schedules.forward import forward_only
from hpctrain.parallel.schedules.messages import Message, inbound, outbound
from hpctrain.transport.link import Link
from hpctrain.transport.shared_memory.host import aligned_zeros
from hpctrain.world import World
from hpctrain.world.grid import Grid


class PipelineReplica:
    """A Replica that is split over the pipe: this rank holds some stages; calls are collective."""

    normalizes_batch = False  #: such a model is refused

    def __init__(
        self,
        model: nn.Model,
        seed: int,
        dtype: np.typing.DTypeLike,
        on_gpu: bool,
        pipe: World,
        grid: Grid,
        plan: StagePlan,
        schedule: str,
    ):
        """Create the arena of this rank's stages; initial values equal a one-rank run's.

        `pipe`: the World of the ranks that hold this replica; `grid` has their links for stages and
        norms.
        """
        self.model, self.loss, self.plan = model, model.loss, plan
        self.wait: AbstractContextManager[Any] = nullcontext()  #: encloses waits for stages
        #: of a tape of each stage, per sample, as measured
        self.sample_bytes: dict[int, float] = {}
        self.samples = 1  #: of the largest micro-batch so far
        self.sent_bytes = 0  #: in messages between stages, in the step with most
        self.peak_tapes = 0  #: the largest number of tapes of stages that lived at one time
        self._pipe, self._link, self._schedule_name = pipe, grid.stages, schedule
        self._parts = {stage: plan.part(model, stage) for stage in plan.stages_of(pipe.rank)}
        self._shapes = {name: p.shape for name, p in model.parameters.items()}
        self.arena = self._make_arena(dtype, on_gpu, grid.norms)
        self._tied_weights = TiedWeights(grid.stages, plan, model, self.arena.param)
        self._bind_views()
        own_names = [slot.name for slot in self.arena.slots]
        for name, values in nn.initial_values(model.parameters, seed, own_names).items():
            xp.copy(self._params[name], values)
        self.schedule: PipelineSchedule | None = None  #: of a step

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return 1 if self.schedule is None else self.schedule.micro_batches

    @micro_batches.setter
    def micro_batches(self, count: int) -> None:
        """Make the schedule for `count` micro-batches; raise UsageError if there is none."""
        ranks = self._pipe.size
        self.schedule = make(self._schedule_name, ranks, count, self.plan.stages // ranks)
        check(self.schedule)

    def gradient(
        self, batch: Batch, scale: float, key: nn.Key, on_ready: Callable[[str], None]
    ) -> nn.Sums:
        """Write the gradient of this rank's stages into the arena; see Replica."""
        assert self.schedule is not None  # `micro_batches` is set
        scale *= mean_factor(self.loss, batch, key)
        pieces = [
            MicroBatch(piece, key._replace(first=key.first + first))
            for piece, first in split_batch(batch, self.schedule.micro_batches)
        ]
        gradient_sums = {
            stage: GradientSums(part, self._grads, len(pieces), on_ready)
            for stage, part in self._parts.items()
        }
        parts = self.model, self._parts, self._params, gradient_sums
        step = TrainingStep(*parts, pieces, scale, self.arena.param, self.sample_bytes)
        samples = [piece.batch.n for piece in pieces]
        self.samples = max(self.samples, *samples)
        sent = self._run_schedule(self.schedule, step.operations, samples, self.wait)
        self.sent_bytes = max(self.sent_bytes, sent)
        self.peak_tapes = max(self.peak_tapes, step.peak_tapes)
        with self.wait:
            self._tied_weights.reduce(gradient_sums, self._params)
            self._tied_weights.wait()
            return self._share_sums(step.losses)

    def memory(self) -> Memory:
        """Return the bytes of this rank by kind, measured and predicted from the schedule."""
        assert self.schedule is not None  # `micro_batches` is set
        model, plan, rank, param = self.model, self.plan, self._pipe.rank, self.arena.param
        actions, samples = self.schedule.actions[rank], self.samples
        length = self._planned_length()
        copied_bytes = sum(x.nbytes for x in self._tied_weights.copies.values())
        planned_elements = length + plan.copied_elements(model, rank)
        tapes = {stage: samples * nbytes for stage, nbytes in self.sample_bytes.items()}
        planned_tapes = {
            stage: samples * predict_sample_bytes(model, part, self._params, samples, param)
            for stage, part in self._parts.items()
        }
        planned_messages = (
            message_bytes(samples * param.itemsize * prod(plan.boundary_shape(model, m.boundary)))
            for _, m in outbound(self.schedule, rank)
        )
        return {
            "parameters": Bytes(param.nbytes + copied_bytes, param.itemsize * planned_elements),
            "gradients": Bytes(self.arena.grad.nbytes, param.itemsize * length),
            "tapes": Bytes(peak_bytes(actions, tapes), peak_bytes(actions, planned_tapes)),
            "messages": Bytes(self.sent_bytes, sum(planned_messages)),
        }

    def evaluate(self, batch: Batch, observe: Observer | None = None) -> nn.Sums:
        """Return the sums over `batch`, computed in the same pieces as on one rank; see Replica.

        `observe` is called on all ranks of the pipe.
        """
        pieces = self.model.evaluation_pieces(batch.n)
        losses: list[nn.Sums | nn.losses.PendingSums] = []
        outputs = self._empty_outputs(0 if observe is None else batch.n)

        def add_loss(y: Array, piece: slice) -> None:
            losses.append(self.model.loss_sums(y, _take_rows(batch.targets, piece)))
            if observe is not None:
                outputs[piece] = xp.to_host(xp.widened(y))

        self._forward(batch.inputs, pieces, add_loss)
        sums = self._share_sums(losses)
        if observe is not None and batch.n:
            broadcast(self._pipe.main, outputs.reshape(-1), self.plan.last_rank)
            observe(outputs, batch.targets)
        return sums

    def predict(self, x: Any) -> np.ndarray:
        """Return the model's outputs for samples `x` (n, ...), the same on all its ranks."""
        n = sample_count(x)
        outputs = self._empty_outputs(n)

        def copy(y: Array, piece: slice) -> None:
            outputs[piece] = xp.to_host(y)

        self._forward(x, self.model.evaluation_pieces(n), copy)
        broadcast(self._pipe.main, outputs.reshape(-1), self.plan.last_rank)
        return outputs

    def _empty_outputs(self, n: int) -> np.ndarray:
        return np.zeros((n, *self.model.output_shape), self.arena.param.dtype)

    def move(self, **planes: np.ndarray) -> None:
        """Move planes to other arrays; see Replica."""
        for name, x in planes.items():
            xp.copy(x, getattr(self.arena, name))
        self.arena = replace(self.arena, **planes)  # type: ignore[arg-type]
        self._bind_views()

    def _forward(
        self, x: Any, pieces: Sequence[slice], take_outputs: Callable[[Array, slice], None]
    ) -> None:
        """Pass `pieces` of the samples `x` through all stages; `take_outputs` gets each output."""

        def forward(action: Action, activation: Array | None) -> Array | None:
            part, piece = self._parts[action.stage], pieces[action.micro]
            if part.start == 0:
                activation = self.model.prepare_samples(_take_rows(x, piece), self.arena.param)
            y, _ = part.forward(self._params, activation, None)
            if action.stage < self.plan.stages - 1:
                return y
            take_outputs(y, piece)
            return None

        schedule = forward_only(len(pieces), self.plan.placement)
        samples = [piece.stop - piece.start for piece in pieces]
        self._run_schedule(schedule, {"F": forward}, samples, nullcontext())
        self._tied_weights.wait()

    def _run_schedule(
        self,
        schedule: PipelineSchedule,
        operations: Mapping[str, Operation],
        samples: list[int],
        wait: AbstractContextManager[Any],
    ) -> int:
        """Run this rank's actions on micro-batches of `samples` samples; return the bytes sent.

        `wait` encloses waits.
        """
        with wait:
            self._tied_weights.update_copies(self._params)
        program = _make_program(schedule, self._pipe.rank)
        boundaries = range(self.plan.stages - 1)
        shapes = [self.plan.boundary_shape(self.model, boundary) for boundary in boundaries]

        def shape_of(message: Message) -> tuple[int, ...]:
            return (samples[message.micro], *shapes[message.boundary])

        link = StageLink(self._link, program.arrivals, shape_of, self.arena.param)
        run_actions(program, operations, link, self._pipe.trace, wait)
        with wait:
            link.close()
        return link.sent_bytes

    def _share_sums(self, losses: Sequence[nn.Sums | nn.losses.PendingSums]) -> nn.Sums:
        """Return the sums over the micro-batches, which the last stage sends to all ranks."""
        total: nn.Sums = reduce(nn.add, map(nn.losses.wait_for_sums, losses), {})
        packed = nn.losses.pack(total, self.loss.terms)
        broadcast(self._pipe.main, packed, self.plan.last_rank)
        return nn.losses.unpack(packed, self.loss.terms)

    def _planned_length(self) -> int:
        """Return the elements of a plane of this rank's slots, from their shapes alone."""
        own_names = self.plan.owned_names(self.model, self._pipe.rank)
        planned = arenas.make_arena(
            self._shapes,
            self.arena.param.dtype,
            zeros=lambda length, dtype: np.broadcast_to(np.zeros(1, dtype), length),  # no memory
            own=own_names,
        )
        return int(planned.param.size)

    def _make_arena(self, dtype: np.typing.DTypeLike, on_gpu: bool, norms: Link) -> arenas.Arena:
        """Return the arena of this rank's stages, which exchanges norms with the other ranks."""
        model, pipe = self.model, self._pipe
        names_of_ranks = [self.plan.owned_names(model, rank) for rank in range(pipe.size)]
        zeros = xp.zeros if on_gpu else aligned_zeros
        arena = arenas.make_arena(self._shapes, dtype, zeros=zeros, own=names_of_ranks[pipe.rank])

        def gather_rows(rows: np.ndarray) -> np.ndarray:
            parts = all_gather_bytes(norms, rows.tobytes())
            shape = (-1, rows.shape[1])
            return ordered_rows(
                [np.frombuffer(part).reshape(shape) for part in parts],
                names_of_ranks,
                arena.model_slots,
            )

        return replace(arena, gather_rows=gather_rows)

    def _bind_views(self) -> None:
        """Create a view of each tensor in the planes."""
        self._params = self.arena.views(self.arena.param) | self._tied_weights.copies
        self._grads = self.arena.views(self.arena.grad)


@lru_cache(maxsize=16)
def _make_program(schedule: PipelineSchedule, rank: int) -> Program:
    """Return the program of `rank`; cached, as a step would spend 2 us per action on it."""
    return Program(rank, route(schedule, rank), inbound(schedule, rank))


def _take_rows(tree: Any, rows: slice) -> Any:
    """Return `rows` of each array of `tree`."""
    return map_arrays(itemgetter(rows), tree)
