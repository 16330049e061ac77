"""A rank's list of actions, run from first to last: a training step, or a forward pass.

    F   forward of a stage: input from the stage before, output to the next one; the tape is kept
    B   backward: I and W in one
    I   gradient of the input, which goes to the stage before; the products of weights are put off
    W   these products, added to the gradients of the stage

The list decides the order, and nothing here depends on the schedule. A stage takes micro-batches in
order, and the scale is the trainer's: so sums have the same bytes as on a single rank with as many
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from hpctrain import nn
from hpctrain.core.xp import Array
from hpctrain.gradients.replica import Batch
from hpctrain.nn.layer import Later, run_now
from hpctrain.nn.part import GradientSums, Part
from hpctrain.parallel.pipeline.stage_link import StageLink
from hpctrain.parallel.pipeline.tape_bytes import tape_bytes
from hpctrain.parallel.schedules.actions import Action, PipelineSchedule
from hpctrain.parallel.schedules.messages import Arrivals, Message, destination, source
from hpctrain.watch.trace import Trace

Operation = Callable[[Action, Any], Array | None]  #: takes the input; returns the output, if any
Product = Callable[[], object]  #: writes the gradients of some weights


class RoutedAction(NamedTuple):
    """An action, with the rank and the message of its input and its output, or None."""

    action: Action
    origin: tuple[int, Message] | None
    target: tuple[int, Message] | None


class Program(NamedTuple):
    """The actions of a rank, and the messages that it receives."""

    rank: int
    actions: tuple[RoutedAction, ...]
    arrivals: Arrivals


class MicroBatch(NamedTuple):
    """A part of a rank's share of a step; `key` has the index of its first sample."""

    batch: Batch
    key: nn.Key


def route(schedule: PipelineSchedule, rank: int) -> tuple[RoutedAction, ...]:
    """Return the actions of `rank`, each with the messages that it receives and sends."""
    return tuple(
        RoutedAction(action, source(schedule, action), destination(schedule, action))
        for action in schedule.actions[rank]
    )


def run_actions(
    program: Program,
    operations: Mapping[str, Operation],
    link: StageLink,
    trace: Trace,
    wait: AbstractContextManager[Any],
) -> None:
    """Run the actions of `program`; receives happen within `wait`."""
    rank = program.rank
    local: dict[Message, Array] = {}  # between stages of this rank
    for action, origin, target in program.actions:
        x = None
        if origin is not None:
            peer, message = origin
            if peer == rank:
                x = local.pop(message)
            else:
                with wait:
                    x = link.receive(peer, message)
        op, stage, micro = action
        start = perf_counter()
        result = operations[op](action, x)
        trace.add(op, "stage", start, perf_counter(), {"stage": stage, "micro": micro})
        if target is not None:
            peer, message = target
            if peer == rank:
                local[message] = result
            else:
                link.send(peer, message, result)


class TrainingStep:
    """The state of a step on one rank: tapes that live, products put off, losses."""

    def __init__(
        self,
        model: nn.Model,
        parts: Mapping[int, Part],
        params: Mapping[str, Array],
        sums: Mapping[int, GradientSums],
        micro_batches: Sequence[MicroBatch],
        scale: float,
        memory: Array,
        sample_bytes: dict[int, float],
    ):
        """`parts` and `sums`: the layers of each stage of this rank, and their gradients.

        Samples are converted to the dtype and the memory of `memory`. `sample_bytes` gets the bytes
        of the first tape of each stage, per sample.
        """
        self._model, self._parts, self._params, self._sums = model, parts, params, sums
        self._micro_batches, self._scale, self._memory = micro_batches, scale, memory
        self._sample_bytes = sample_bytes
        self._tapes: dict[tuple[int, int], Any] = {}
        self._products: dict[tuple[int, int], list[Product]] = {}
        self._loss_gradients: dict[int, Array] = {}  # of the last stage, by micro-batch
        #: of the last stage, in the order of micro-batches
        self.losses: list[nn.Sums | nn.losses.PendingSums] = []
        self.peak_tapes = 0  #: the largest number of tapes that lived at one time
        self.operations: dict[str, Operation] = {
            "F": self._forward,
            "B": partial(self._backpropagate, later=run_now),
            "I": self._input_gradient,
            "W": self._weight_gradients,
        }

    def _forward(self, action: Action, x: Array | None) -> Array | None:
        _, stage, micro = action
        (batch, key), part = self._micro_batches[micro], self._parts[stage]
        if part.start == 0:
            x = self._model.prepare_samples(batch.inputs, self._memory)
        y, tape = part.forward(self._params, x, key)
        if stage not in self._sample_bytes and batch.n:
            self._sample_bytes[stage] = tape_bytes(tape, self._params) / batch.n
        self._tapes[stage, micro] = tape
        self.peak_tapes = max(self.peak_tapes, len(self._tapes) + len(self._products))
        if part.stop < len(self._model.layers):
            return y
        sums, self._loss_gradients[micro] = self._model.loss_gradient(y, batch.targets, self._scale)
        self.losses.append(sums)
        return None

    def _input_gradient(self, action: Action, dy: Array | None) -> Array | None:
        products = self._products[action.stage, action.micro] = []
        return self._backpropagate(action, dy, products.append)

    def _weight_gradients(self, action: Action, _: None) -> None:
        for product in self._products.pop((action.stage, action.micro)):
            product()

    def _backpropagate(self, action: Action, dy: Array | None, later: Later) -> Array | None:
        """Return the gradient of the stage's input; None for the first stage."""
        _, stage, micro = action
        if dy is None:
            dy = self._loss_gradients.pop(micro)
        tape = self._tapes.pop((stage, micro))
        return self._parts[stage].backward(self._params, self._sums[stage], tape, dy, later)
