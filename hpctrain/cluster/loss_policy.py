"""How a job goes on after the loss of ranks: with the survivors (ULFM), or by another start.

    hpctrain launch --elastic -n N --spares K  ->  mpiexec --with-ft ulfm ... -n N+K

The last K ranks wait as spares. The exit code of mpiexec says nothing about lost ranks: it is 0 if
the survivors succeed, and also if the daemon of a node dies.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.core.errors import UsageError
from hpctrain.core.launchers import MIN_RANKS, SPARES


@dataclass(frozen=True)
class LossPolicy:
    """The measures of a job against the loss of ranks."""

    elastic: bool = False  #: the survivors go on
    spares: int = 0  #: additional ranks, which take the places of lost ones
    min_ranks: int | None = None  #: None: as in the recipe; 1 after a restart
    max_restarts: int = 0

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the ranks."""
        values = {SPARES: self.spares or None, MIN_RANKS: self.min_ranks}
        return {name: str(value) for name, value in values.items() if value is not None}


def check_policy(n: int, policy: LossPolicy) -> None:
    """Raise UsageError, with the first fault of the options that start `n` ranks."""
    spares, min_ranks = policy.spares, policy.min_ranks
    is_present_by_fault = {
        f"--spares: expected 0 or more, seen {spares}": spares < 0,
        f"--max-restarts: expected 0 or more, seen {policy.max_restarts}": (
            policy.max_restarts < 0
        ),
        f"--min-ranks: expected 1 to {n}, the ranks that train, seen {min_ranks}": (
            min_ranks is not None and not 1 <= min_ranks <= n
        ),
        f"--spares {spares}: only an elastic job has spares; add --elastic": (
            spares > 0 and not policy.elastic
        ),
        f"--min-ranks {min_ranks}: without --elastic or --max-restarts a lost rank ends the job": (
            min_ranks is not None and not (policy.elastic or policy.max_restarts)
        ),
    }
    for fault, is_present in is_present_by_fault.items():
        if is_present:
            raise UsageError(fault)
