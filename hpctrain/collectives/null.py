"""The all-reduce that sends nothing, to time a step without communication.

Every rank keeps its own gradient, so training with this algorithm is useful only for timing.
"""

from __future__ import annotations

import numpy as np

from hpctrain.collectives.group import Group
from hpctrain.collectives.reductions.operations import Operation


def null(group: Group, x: np.ndarray, op: Operation) -> None:
    """Leave `x` unchanged."""
