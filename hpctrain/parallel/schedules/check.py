"""Checks of a pipeline schedule before a run: complete, in order, without deadlock; its costs.

Sends are buffered and receives are posted in the sender's order (messages.py). So an action waits
for nothing but the actions that it needs and earlier actions in its rank's list, and a schedule
deadlocks if, and only if, these form a cycle.

Each stage takes each operation in the order of micro-batches. Gradients are then summed as on one
rank, in the same order and to the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hpctrain.core.errors import UsageError
from hpctrain.parallel.schedules.actions import Action, ActionList, PipelineSchedule
from hpctrain.parallel.schedules.messages import outbound

Pair = tuple[int, int]  #: sender, receiver
LIVE_CHANGES = {"F": 1, "I": 0, "W": -1, "B": -1}


@dataclass(frozen=True)
class ScheduleReport:
    """The costs of a schedule that passed its checks; peaks count tapes of a stage."""

    peak_activations: tuple[int, ...]  #: of each rank
    messages: dict[Pair, int]
    bytes: dict[Pair, int]

    def sent(self, rank: int) -> tuple[int, int]:
        """Return the number of messages that `rank` sends, and their bytes."""
        pairs = [pair for pair in self.messages if pair[0] == rank]
        return sum(self.messages[p] for p in pairs), sum(self.bytes[p] for p in pairs)


def check(schedule: PipelineSchedule, boundary_bytes: Sequence[int] | int = 0) -> ScheduleReport:
    """Return the costs of `schedule`; raise UsageError with the first fault.

    `boundary_bytes`: the size of a micro-batch's activation between the stages i and i + 1, and of
    its gradient; an integer holds for all boundaries.
    """
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not (
                0 <= action.stage < schedule.stages and 0 <= action.micro < schedule.micro_batches
            ):
                raise UsageError(
                    f"{schedule.name}, rank {rank}: expected {schedule.stages} stages and "
                    f"{schedule.micro_batches} micro-batches, seen {action}"
                )
            if schedule.placement[action.stage] != rank:
                raise UsageError(
                    f"{schedule.name}, rank {rank}: {action}, which is on rank "
                    f"{schedule.placement[action.stage]}; move the action there"
                )
        _check_counts(schedule, rank, actions)
    _check_order(schedule)
    for _ in execution_order(schedule):
        pass
    messages, nbytes = Counter[Pair](), Counter[Pair]()
    sizes = bytes_per_boundary(schedule, boundary_bytes)
    for rank in range(schedule.ranks):
        for receiver, message in outbound(schedule, rank):
            messages[rank, receiver] += 1
            nbytes[rank, receiver] += sizes[message.boundary]
    bytes_of_pairs = {pair: nbytes[pair] for pair in messages}
    return ScheduleReport(peak_activations(schedule), dict(messages), bytes_of_pairs)


def peak_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the largest number of live tapes on each rank.

    A tape holds the activations of a stage for a micro-batch, from F to the end of B or W.
    """
    changes = ([LIVE_CHANGES[action.op] for action in actions] for actions in schedule.actions)
    return tuple(max(accumulate(of_rank), default=0) for of_rank in changes)


def execution_order(schedule: PipelineSchedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) so that each action follows the actions that it needs.

    Raises UsageError if ranks wait for each other: a deadlock.
    """
    finished: set[Action] = set()
    positions = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        actions = schedule.actions[rank]
        while positions[rank] < len(actions):
            action = actions[positions[rank]]
            missing = next((a for a in needs(schedule, action) if a not in finished), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, action
            positions[rank] += 1
            result = action._replace(op="I") if action.op == "B" else action  # as `needs` says
            finished.add(result)
            ready += waiting.pop(result, ())
    if waiting:
        raise UsageError(_deadlock_message(schedule, positions, waiting))


def needs(schedule: PipelineSchedule, action: Action) -> tuple[Action, ...]:
    """Return the actions whose results `action` uses; I stands for I or B."""
    op, stage, micro = action
    if op == "F":
        return (Action("F", stage - 1, micro),) if stage else ()
    if op == "W":
        return (Action("I", stage, micro),)
    forward = Action("F", stage, micro)
    is_last = stage == schedule.stages - 1
    return (forward,) if is_last else (forward, Action("I", stage + 1, micro))


def _check_counts(schedule: PipelineSchedule, rank: int, actions: ActionList) -> None:
    counts = Counter(actions)
    for stage in schedule.stages_of(rank):
        for micro in range(schedule.micro_batches):
            ops = "".join(op * counts[Action(op, stage, micro)] for op in ("F", "B", "I", "W"))
            if ops not in ("FB", "FIW"):
                raise UsageError(
                    f"{schedule.name}, rank {rank}, stage {stage}, micro-batch {micro}: expected "
                    f"F and B, or F, I and W, once each, seen {' '.join(ops) or 'no action'}"
                )


def _check_order(schedule: PipelineSchedule) -> None:
    """B counts as I and as W: both are in the order of micro-batches."""
    for rank, actions in enumerate(schedule.actions):
        expected: Counter[tuple[str, int]] = Counter()
        for action in actions:
            for op in "IW" if action.op == "B" else action.op:
                if action.micro != expected[op, action.stage]:
                    raise UsageError(
                        f"{schedule.name}, rank {rank}, stage {action.stage}: expected {op} of "
                        f"micro-batch {expected[op, action.stage]}, seen {action}; a stage takes "
                        "micro-batches in order, so that sums have the bits of one rank"
                    )
                expected[op, action.stage] += 1


def _deadlock_message(
    schedule: PipelineSchedule, positions: Sequence[int], waiting: dict[Action, list[int]]
) -> str:
    """Return the text of a deadlock: where each rank that does not end waits, and for what."""
    texts = [
        f"rank {rank}, action {positions[rank]}: {schedule.actions[rank][positions[rank]]} waits "
        f"for {missing} of rank {schedule.placement[missing.stage]}"
        for missing, ranks in waiting.items()
        for rank in ranks
    ]
    return f"{schedule.name}: deadlock; " + "; ".join(sorted(texts))


def bytes_per_boundary(
    schedule: PipelineSchedule, boundary_bytes: Sequence[int] | int
) -> Sequence[int]:
    """Return the bytes of each boundary; raise UsageError unless there is one less than stages."""
    boundaries = schedule.stages - 1
    if isinstance(boundary_bytes, int):
        return [boundary_bytes] * boundaries
    if len(boundary_bytes) != boundaries:
        raise UsageError(
            f"{schedule.name}: expected the bytes of {boundaries} boundaries between "
            f"{schedule.stages} stages, seen {len(boundary_bytes)}"
        )
    return boundary_bytes
