"""Cases drawn from a campaign: each a function of (campaign, index) and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hpctrain.tools.chaos.campaign import Campaign, FaultsOptions, LimitsOptions
from hpctrain.tools.chaos.case import (
    Case,
    FailingFile,
    Fault,
    FullDisk,
    HostFault,
    LinkCall,
    Moment,
    Signal,
    Table,
)
from hpctrain.tools.chaos.oracle import lost_ranks

#: How often rank 0, and how often any other, does what to files of a small run, about.
OPERATIONS = {
    0: {"any": 130, "open": 25, "write": 25, "fsync": 35, "rename": 15, "unlink": 20, "mkdir": 15,
        "read": 60, "truncate": 1},
    1: {"any": 24, "open": 8, "write": 8, "fsync": 8, "rename": 1, "read": 30, "unlink": 1},
}  # fmt: skip
ERRORS = ["ENOSPC", "EIO", "EROFS", "EDQUOT"]
#: Where the launcher is killed, steps are so long that ranks which train on are seen doing so.
ORPHAN_MS, ORPHAN_STEPS = 200.0, 15
MAX_START_MS = 4000.0
NEEDS_TWO_RANKS = {"stop-rank", "cut-link", "dead-host"}  #: other ranks notice these faults
KILLS = {"kill-rank", "kill-two"}
RECOVERY_CALLS = 60  #: of a link during a recovery, about
STOPPING = ("SIGSTOP", "cut")


class FaultDraw:
    """Draws the faults of a case."""

    def __init__(self, draw: random.Random, options: FaultsOptions, case: Case):
        self._draw, self._options, self._case = draw, options, case
        self._is_first, self._part = True, 0.0

    def faults(self) -> list[Fault]:
        """Return the faults of the case; in a period they follow each other."""
        count = self._draw.choice(self._options.count)
        kinds = [kind for kind in self._options.kinds if self._is_possible(kind)]
        faults: list[Fault] = []
        for _ in range(count if kinds else 0):
            self._is_first = not faults
            kind = self._draw.choice(kinds)
            if kind != "stop-rank" or self._leaves_observer(faults):
                faults.append(MAKERS[kind](self))
        period_s = self._options.period_s
        if not self._case.is_elastic or period_s is None:
            return faults
        return [self._at(fault, 1000 * period_s * (i + 1)) for i, fault in enumerate(faults)]

    def _is_possible(self, kind: str) -> bool:
        if self._case.launcher == "threads" and kind not in KILLS:
            return False
        if kind in NEEDS_TWO_RANKS and self._case.ranks < 2:
            return False
        return kind != "kill-two" or self._case.ranks > 2

    def _leaves_observer(self, faults: list[Fault]) -> bool:
        """Return whether, after `faults`, another rank is left to notice a rank that stops."""
        case = replace(self._case, faults=faults)
        return not case.is_elastic or lost_ranks(case) <= case.job_ranks - 2

    def _at(self, fault: Fault, delay_ms: float) -> Fault:
        if not isinstance(fault, Signal):
            return fault
        return Signal(fault.signal, fault.target, 1, delay_ms, fault.times, fault.others)

    def _step(self, last: int) -> int:
        """Draw a step; the first and the last steps are more frequent than other steps."""
        last = max(1, last)
        return self._draw.choice([1, *[self._draw.randint(min(2, last), last)] * 4, last])

    @property
    def _last_step(self) -> int:
        return self._case.steps * 6 // 7

    @property
    def _delay_ms(self) -> float:
        return round(self._draw.uniform(0, self._options.delay_ms), 1)

    def to_ranks(self, signals: list[str], victims: int = 1) -> Signal | LinkCall:
        """Return the same signal to `victims` ranks at once."""
        target, *others = self._draw.sample(range(self._case.job_ranks), victims)
        moment = self._draw.choice(self._options.moments)
        if moment == "recovery" and self._is_first:  # there is none yet
            moment = "step"
        if self._case.launcher == "threads":
            if moment == "recovery":
                return LinkCall(target, self._part, self._draw.randint(1, RECOVERY_CALLS), others)
            self._part = round(self._draw.random(), 5)
            return LinkCall(target, self._part, 0, others)
        signal_name = self._draw.choice(signals)
        if moment == "start":
            return Signal(signal_name, target, None, round(self._start_ms / 8), others=others)
        step: int | None = self._step(self._last_step)
        if moment == "recovery" and not self._case.is_elastic:
            step = None  # while the resumed job loads its checkpoint
        during: Moment = moment
        return Signal(signal_name, target, step, self._delay_ms, 1, others, during)

    def to_launcher(self, signals: list[str]) -> Signal:
        """Return a signal to the launcher."""
        number = self._draw.choice(signals)
        times = 2 if number == "SIGINT" and self._draw.random() < 0.5 else 1
        if self._draw.random() < 0.3:  # at any time, mostly during the start
            return Signal(number, -1, None, self._start_ms, times)
        last = min(ORPHAN_STEPS, self._last_step) if number == "SIGKILL" else self._last_step
        return Signal(number, -1, self._draw.randint(1, last), self._delay_ms, times)

    @property
    def _start_ms(self) -> float:
        return round(self._draw.uniform(50, MAX_START_MS))

    def full_disk(self) -> FullDisk:
        """Return a disk of a size that a run may fill."""
        low, high = self._options.disk_kib
        return FullDisk(4 * self._draw.randint(-(-low // 4), high // 4))

    def failing_file(self) -> FailingFile:
        """Return a failing operation on a file."""
        rank = self._draw.choice([0, 0, 0, -1, self._case.ranks - 1])
        counts = OPERATIONS[0 if rank < 1 else 1]
        operation = self._draw.choice(["any", "any", *counts])
        number = self._draw.randint(1, counts[operation])
        effects = [*ERRORS, "kill", "kill", "after"]
        if operation == "read":
            effects = ["EIO"]
        if operation == "write":
            effects += ["short", "torn", "torn"]
        effect = self._draw.choice(effects)
        stays = effect not in ("kill", "after", "torn", "EIO") and self._draw.random() < 0.5
        return FailingFile(rank, operation, number, effect, stays)

    def to_host(self, effect: str) -> HostFault:
        """Return a fault of a host."""
        rank = self._draw.randrange(self._case.ranks)
        step = self._step(self._last_step)
        return HostFault(effect, rank, step, self._delay_ms)  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[FaultDraw], Fault]] = {
    "kill-rank": lambda draw: draw.to_ranks(["SIGKILL"]),
    "kill-two": lambda draw: draw.to_ranks(["SIGKILL"], victims=2),
    "stop-rank": lambda draw: draw.to_ranks(["SIGSTOP"]),
    "signal-rank": lambda draw: draw.to_ranks(["SIGUSR1", "SIGTERM"]),
    "kill-launcher": lambda draw: draw.to_launcher(["SIGKILL"]),
    "signal-launcher": lambda draw: draw.to_launcher(["SIGTERM", "SIGINT", "SIGUSR1"]),
    "full-disk": FaultDraw.full_disk,
    "failing-file": FaultDraw.failing_file,
    "cut-link": lambda draw: draw.to_host("cut"),
    "slow-link": lambda draw: draw.to_host("slow"),
    "dead-host": lambda draw: draw.to_host("dead"),
}


def draw_case(campaign: Campaign, index: int) -> Case:
    """Return case `index`; each engine and recipe is drawn as often as any other."""
    options, count = campaign.options, len(campaign.subjects)
    order = list(campaign.subjects)
    random.Random(f"{options.seed} round {index // count}").shuffle(order)
    subject = order[index % count]
    draw = random.Random(f"{options.seed} case {index}")
    launcher = draw.choice(options.launchers)
    ranks = draw.choice([ranks for ranks in options.ranks if subject.fits(ranks)])
    spares = draw.choice(options.spares) if launcher == "elastic" else 0
    recipe = subject.recipe_for(draw.randrange(1 << 16))
    if launcher == "threads" and "faults" in recipe:  # nothing is timed: no need to sleep
        recipe = {**recipe, "faults": {**recipe["faults"], "step_ms": 0.0}}
    plain = Case(
        options.seed, index, ranks, subject.name, recipe, launcher, [], spares,
        options.launcher_options, subject.epoch_samples, subject.batch_for(ranks),
        options.limits.attempt_s,
    )  # fmt: skip
    faults = FaultDraw(draw, options.faults, plain).faults()
    return replace(plain, recipe=_with_limit(recipe, faults, options.limits), faults=faults)


def _with_limit(recipe: Table, faults: list[Fault], limits: LimitsOptions) -> Table:
    """Return the recipe with a short limit for hangs if a fault stops a rank or a link."""
    effects = {getattr(fault, "signal", getattr(fault, "effect", "")) for fault in faults}
    if not effects & {*STOPPING, "dead"}:
        return recipe
    return {**recipe, "run": {**recipe["run"], "timeout_s": limits.hang_s}}
