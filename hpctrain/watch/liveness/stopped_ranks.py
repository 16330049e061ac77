"""Stopped ranks of a node: silent, and stopped or blocked in the kernel for longer than a limit.

    heartbeat   |    |    |
    state                     T T T T T T T T T T   SIGKILL
                              |<---- limit ---->|   at each look

Silence alone proves nothing: a rank that computes in C and holds the interpreter's lock writes no
heartbeat either. Then the kernel reports that it runs or sleeps, and its silence counts anew.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.watch.liveness.processes import ProcessIdentity, ProcessState, read_state

LIMIT_S, LIMIT_STEPS = 2.0, 10  #: a rank is stopped after LIMIT_S, or this many median steps
#: A rank that reads a mapped file from a busy file system may hold the interpreter's lock and be
#: blocked in the kernel for seconds; it is lost after this many limits.
BLOCKED_FACTOR = 10
FIRST_LOOK = 0.25  #: the part of a limit after which the kernel is asked about a silent rank
_LAST_STEPS = 64


class StepTimes:
    """Times of the last training steps, from the number of the current one at regular looks."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_LAST_STEPS)
        self._step, self._since_s = -1, 0.0

    def observe(self, step: int, awake_s: float) -> None:
        """Record that `step` is under way at `awake_s`."""
        if step == self._step:
            return
        if 0 <= self._step < step:
            self._times_s.append((awake_s - self._since_s) / (step - self._step))
        self._step, self._since_s = step, awake_s

    def limit_s(self, least_s: float = LIMIT_S) -> float:
        """Return the limit of silence."""
        return max(least_s, LIMIT_STEPS * statistics.median(self._times_s or [0.0]))


@dataclass
class _Silence:
    """The silence of a rank, as observed; times are seconds that the observer was awake."""

    heartbeat: float
    heard_s: float  #: when the last heartbeat was observed
    state: ProcessState | None = None  #: at the last look
    stopped_s: float | None = None  #: since when each look shows that it is stopped
    killed_s: float | None = None
    is_reported: bool = False


@dataclass(frozen=True)
class StoppedRank:
    """A rank to be killed, or a rank that SIGKILL does not end."""

    rank: int
    process: ProcessIdentity
    reason: str
    outlives_kill: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.process.pid}): {self.reason}"


class StoppedRanks:
    """The silences of a node's ranks, as a rank of the node observes them."""

    def __init__(
        self,
        rank: int,
        processes: Mapping[int, ProcessIdentity],
        read: Callable[[ProcessIdentity], ProcessState | None] = read_state,
    ) -> None:
        """Observe as `rank` the `processes` of this node's ranks.

        Ranks in other namespaces of process ids, in containers of their own, cannot be judged.
        """
        namespace = processes[rank].namespace
        self._processes = {r: p for r, p in processes.items() if p.namespace == namespace}
        self._rank, self._read = rank, read
        self._silences: dict[int, _Silence] = {}

    def restart(self) -> None:
        """Begin all silences anew: this process was itself stopped, perhaps with its job."""
        self._silences = {r: s for r, s in self._silences.items() if s.killed_s is not None}

    def observe(
        self, heartbeats: Mapping[int, float], awake_s: float, limit_s: float
    ) -> list[StoppedRank]:
        """Return the ranks that this rank has to kill, or to report; each once.

        `heartbeats`: the value in each rank's record; only its changes count.
        """
        for rank, heartbeat in heartbeats.items():
            silence = self._silences.get(rank)
            if rank not in self._processes or rank == self._rank:
                continue
            if silence is None or silence.heartbeat != heartbeat:
                killed_s = None if silence is None else silence.killed_s
                self._silences[rank] = _Silence(heartbeat, awake_s, killed_s=killed_s)
        if not self._is_lowest(awake_s, limit_s):
            return []
        verdicts = [self._judge_rank(rank, awake_s, limit_s) for rank in sorted(self._silences)]
        return [verdict for verdict in verdicts if verdict is not None]

    def _is_lowest(self, awake_s: float, limit_s: float) -> bool:
        lower_silences = (silence for rank, silence in self._silences.items() if rank < self._rank)
        return all(awake_s - silence.heard_s > limit_s / 2 for silence in lower_silences)

    def _judge_rank(self, rank: int, awake_s: float, limit_s: float) -> StoppedRank | None:
        silence = self._silences[rank]
        if silence.killed_s is not None:
            return self._judge_killed(rank, silence.killed_s, awake_s, limit_s)
        if awake_s - silence.heard_s <= limit_s * FIRST_LOOK:
            return None
        previous_state, silence.state = silence.state, self._read(self._processes[rank])
        if silence.state is None or not silence.state.shows_stop(previous_state):
            silence.stopped_s = None
            return None
        silence.stopped_s = awake_s if silence.stopped_s is None else silence.stopped_s
        limit_s *= BLOCKED_FACTOR if silence.state.is_blocked else 1
        if awake_s - silence.stopped_s <= limit_s:
            return None
        silence.killed_s = awake_s
        silent_s = awake_s - silence.heard_s
        reason = f"no heartbeat for {silent_s:.1f} s (limit {limit_s:.1f} s), {silence.state}"
        return StoppedRank(rank, self._processes[rank], reason)

    def _judge_killed(
        self, rank: int, killed_s: float, awake_s: float, limit_s: float
    ) -> StoppedRank | None:
        silence, process = self._silences[rank], self._processes[rank]
        if silence.is_reported or awake_s - killed_s <= limit_s:
            return None
        silence.is_reported = True
        state = self._read(process)
        if state is None or state.has_ended:
            return None
        reason = f"SIGKILL has not ended it within {limit_s:.1f} s, {state}"
        return StoppedRank(rank, process, reason, outlives_kill=True)
