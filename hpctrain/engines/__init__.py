"""Training regimes, one file each; the words are those of `engine.py`."""

from hpctrain.engines.allreduce import AllReduceOptions as AllReduce
from hpctrain.engines.engine import Engine, Flags, Task, Times, Work
from hpctrain.engines.single import SingleOptions as Single

#: The options of each regime by the name that people type; `build` makes the engine.
ENGINES = {"single": Single, "allreduce": AllReduce}

__all__ = ["ENGINES", "AllReduce", "Engine", "Flags", "Single", "Task", "Times", "Work"]
