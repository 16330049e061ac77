"""Messages between stages: which action sends which message, and in which order they arrive.

    F of stage s        -> activation for stage s + 1
    I or B of stage s   -> gradient for stage s - 1

Two stages of a rank exchange no message. A link has no tags: messages between a pair of ranks
arrive in the order of the sender's list, and messages of a kind have the same size. A rank that
posts its receives in the order in which it needs them would compute with the wrong micro-batch,
without an error. So receives are posted as `inbound` lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from hpctrain.parallel.schedules.actions import Action, PipelineSchedule

Kind = Literal["activation", "gradient"]


class Message(NamedTuple):
    """An activation or a gradient; `stage` is the stage that needs it."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        """Return a text such as "activation of micro-batch 3 for stage 1"."""
        return f"{self.kind} of micro-batch {self.micro} for stage {self.stage}"

    @property
    def boundary(self) -> int:
        """The boundary that it crosses: i lies between the stages i and i + 1."""
        return self.stage - 1 if self.kind == "activation" else self.stage


Arrivals = Mapping[int, tuple[Message, ...]]  #: peer: its messages, in order


def destination(schedule: PipelineSchedule, action: Action) -> tuple[int, Message] | None:
    """Return the result of `action` and the rank that needs it; None if it makes none."""
    op, stage, micro = action
    if op == "F" and stage + 1 < schedule.stages:
        message = Message("activation", stage + 1, micro)
    elif op in "IB" and stage > 0:
        message = Message("gradient", stage - 1, micro)
    else:
        return None
    return schedule.placement[message.stage], message


def source(schedule: PipelineSchedule, action: Action) -> tuple[int, Message] | None:
    """Return the input of `action` and the rank that makes it; None if it needs none."""
    op, stage, micro = action
    sender_stage = stage - 1 if op == "F" else stage + 1
    if op == "W" or not 0 <= sender_stage < schedule.stages:
        return None
    kind: Kind = "activation" if op == "F" else "gradient"
    return schedule.placement[sender_stage], Message(kind, stage, micro)


def outbound(schedule: PipelineSchedule, rank: int) -> Iterator[tuple[int, Message]]:
    """Yield (receiver, message) for each message that `rank` sends, in order."""
    for action in schedule.actions[rank]:
        if (sent := destination(schedule, action)) is not None and sent[0] != rank:
            yield sent


def inbound(schedule: PipelineSchedule, rank: int) -> Arrivals:
    """Return the messages that each peer sends to `rank`, in the order of the peer's list."""
    return {
        peer: arrivals
        for peer in range(schedule.ranks)
        if (arrivals := tuple(m for to, m in outbound(schedule, peer) if to == rank))
    }
