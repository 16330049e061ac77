"""PyTorch on the MPI of the user: the backend "hpctrain" of `torch.distributed`.

    import torch.distributed as dist
    dist.init_process_group("hpctrain")      under srun, mpirun, `hpctrain launch`, or alone

With hpctrain installed beside PyTorch no import is needed: PyTorch calls `autoload.register` at its
own import (entry point `torch.backends`). `import hpctrain.torch` does the same explicitly. Neither
starts MPI; `init_process_group` does. See docs/pytorch.md.
"""

from hpctrain.torch.autoload import register

__all__ = ["register"]

register()
