"""PyTorch on the MPI of the user: scripts of `torch.distributed`, and modules under every engine.

    import torch.distributed as dist
    dist.init_process_group("hpctrain")      under srun, mpirun, `hpctrain launch`, or alone

With hpctrain installed beside PyTorch no import is needed: PyTorch calls `autoload.register` at its
own import (entry point `torch.backends`). `import hpctrain.torch` does the same explicitly. Neither
starts MPI; `init_process_group` does. `python -m hpctrain.torch SCRIPT` also sets torchrun's
variables before the script starts, and imports no PyTorch.

`ht.torch.Trainer` trains a module under every engine, `ht.torch.sync` sums the gradients of a loop
of the user's own, and `ht.torch.allreduce` and its neighbours are collectives on tensors. See
docs/pytorch.md.
"""

# ruff: noqa: F405
import sys
from typing import TYPE_CHECKING

from hpctrain.core.lazy import lazy_names
from hpctrain.torch.autoload import register

if TYPE_CHECKING:
    from hpctrain.torch.public import *  # noqa: F403  (`__all__` repeats its names)

__all__ = [
    "Loss", "Model", "Trainer", "all_gather", "all_to_all", "allreduce", "bind", "broadcast",
    "gather", "reduce", "reduce_scatter", "register", "scatter", "sync",
]  # fmt: skip

__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "public"))

# Python sets this name while it looks for the module of `-m`.
_runs_script = sys.argv[:1] == ["-m"] and __name__ in sys.orig_argv
if not _runs_script:
    register()
