"""Settings from Horovod's variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hpctrain.core.errors import UsageError
from hpctrain.torch.job import is_ordered
from hpctrain.world import DEFAULT_TIMEOUT_S

FUSION, CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"
WARN, LIMIT = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
NO_CHECK = "HOROVOD_STALL_CHECK_DISABLE"


class Settings(NamedTuple):
    """How operations are fused, and how long ranks wait for each other."""

    fusion_bytes: int = 64 << 20  #: of tensors that are reduced together
    cycle_s: float = 1e-3  #: between two looks of the thread for messages
    warn_s: float = 60.0  #: after which ranks are named that have not submitted a tensor
    limit_s: float = DEFAULT_TIMEOUT_S  #: after which that is an error
    is_ordered: bool = False  #: whether sums are added in the order of ranks
    threaded: bool = False  #: whether the thread has a core of its own


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of the variables; raise UsageError for a value that is none."""
    defaults = Settings()
    warn_s = _number(environ, WARN, defaults.warn_s)
    if environ.get(NO_CHECK, "0") not in ("", "0"):
        warn_s = float("inf")
    return Settings(
        fusion_bytes=int(_number(environ, FUSION, defaults.fusion_bytes)),
        cycle_s=_number(environ, CYCLE, 1e3 * defaults.cycle_s) / 1e3,
        warn_s=warn_s,
        limit_s=_number(environ, LIMIT, 0.0) or defaults.limit_s,
        is_ordered=is_ordered(),
    )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "") or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}: expected a number >= 0, seen {text!r}")
    return value
