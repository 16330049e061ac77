"""The clock of a pipeline schedule: start and end of each action, and the idle time of each rank.

    rank 0    [ F 0 ][o]                    o: overhead of a message, on the sender's processor
    its port            [ g + m G ]         one message at a time, in the order of the list
    wire                        ---- L ---->
    rank 1                                  [o][ F 0 ]

An action starts when its predecessor in the rank's list has ended and its message is there. The
costs of messages follow tuning/model/loggp.py; without wires they take no time. The receiver's port
is always free: it has two peers at most, or three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules.actions import PipelineSchedule
from hpctrain.parallel.schedules.check import bytes_per_boundary, execution_order
from hpctrain.parallel.schedules.messages import Message, destination, source
from hpctrain.tuning.model.loggp import Wire

Wires = Callable[[int, int], Wire]  #: of (sender, receiver)
FREE_WIRE = Wire(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StageCosts:
    """Seconds of F, I and W of each stage on one micro-batch; B takes the time of I plus W."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]

    def by_op(self) -> dict[str, Sequence[float]]:
        """Return the seconds of each operation, by stage."""
        backward = [i + w for i, w in zip(self.input, self.weight, strict=True)]
        return {"F": self.forward, "I": self.input, "W": self.weight, "B": backward}


@dataclass(frozen=True)
class Timeline:
    """Seconds from the begin of the step, for each action of each rank's list."""

    schedule: PipelineSchedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has ended."""
        return max(ends[-1] for ends in self.ends)

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank computes nothing."""
        return tuple(
            1 - (sum(ends) - sum(starts)) / self.makespan
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble(self) -> float:
        """The mean of the idle shares."""
        return sum(self.idle_shares) / len(self.ends)


def uniform_costs(
    schedule: PipelineSchedule, forward: float, input: float, weight: float
) -> StageCosts:
    """Return the costs of equal stages; the arguments are totals over the stages of a rank.

    So schedules with one stage per rank and with several have as much to compute.
    """
    rank_costs = (forward, input, weight)
    return StageCosts(
        *((cost / schedule.stages_per_rank,) * schedule.stages for cost in rank_costs)
    )


def run_clock(
    schedule: PipelineSchedule,
    costs: StageCosts,
    wires: Wires | Wire = FREE_WIRE,
    boundary_bytes: Sequence[int] | int = 0,
) -> Timeline:
    """Return the timeline of `schedule`; raise UsageError if it deadlocks.

    `boundary_bytes`: as `check` takes them. Stages of one rank exchange no message.
    """
    for name, by_stage in vars(costs).items():
        if len(by_stage) != schedule.stages:
            raise UsageError(
                f"{schedule.name}, costs of {name}: expected the seconds of {schedule.stages} "
                f"stages, seen {len(by_stage)}"
            )
    seconds = costs.by_op()
    wire_of = (lambda sender, receiver: wires) if isinstance(wires, Wire) else wires
    sizes = bytes_per_boundary(schedule, boundary_bytes)
    now, port_free = [0.0] * schedule.ranks, [0.0] * schedule.ranks
    arrivals: dict[Message, float] = {}
    starts: list[list[float]] = [[] for _ in range(schedule.ranks)]
    ends: list[list[float]] = [[] for _ in range(schedule.ranks)]
    for rank, action in execution_order(schedule):
        if (received := source(schedule, action)) is not None and received[0] != rank:
            peer, message = received
            now[rank] = max(now[rank], arrivals.pop(message)) + wire_of(peer, rank).overhead
        starts[rank].append(now[rank])
        now[rank] += seconds[action.op][action.stage]
        ends[rank].append(now[rank])
        if (sent := destination(schedule, action)) is not None and sent[0] != rank:
            peer, message = sent
            wire = wire_of(rank, peer)
            now[rank] += wire.overhead
            transfer = wire.gap + sizes[message.boundary] * wire.seconds_per_byte
            port_free[rank] = max(now[rank], port_free[rank]) + transfer
            arrivals[message] = port_free[rank] - wire.gap + wire.latency
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))
