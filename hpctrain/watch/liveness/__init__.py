"""Losses that MPI does not detect: ranks that are stopped, hosts that are dead.

record of each rank    heartbeat, once a second          watch/record.py
stopped_ranks.py       silence + the kernel's state      -> SIGKILL, by the lowest rank alive
host_ring.py           silence + no answer of the kernel -> the host's ranks are lost
"""

from hpctrain.watch.liveness.observer import LivenessObserver
from hpctrain.watch.liveness.setup import Identities, LossReports, observe_liveness

__all__ = ["Identities", "LivenessObserver", "LossReports", "observe_liveness"]
