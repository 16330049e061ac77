"""`python -m hpctrain.torch SCRIPT`: a script made for torchrun on the ranks of MPI."""

from __future__ import annotations

import sys

from hpctrain.core.launchers import Launched
from hpctrain.transport import script

HELP = """\
usage: python -m hpctrain.torch SCRIPT [ARGS]...
       python -m hpctrain.torch -m MODULE [ARGS]...
       python -m hpctrain.torch -c CODE [ARGS]...

Run a script made for torchrun on the ranks that mpirun or srun has started: MPI
is started first, and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK,
NODE_RANK, MASTER_ADDR and MASTER_PORT are set. The script runs as it is, with
the backend hpctrain, gloo or nccl. An error on any rank ends the job.

examples:
  mpirun -n 4 python -m hpctrain.torch train.py --backend=hpctrain
  srun -N 2 --ntasks-per-node=4 python -m hpctrain.torch train.py
  mpirun -n 2 python -m hpctrain.torch -m my_package.train --epochs 3
  hpctrain launch -n 4 -- python train.py      (sets the variables by itself)
"""


def main() -> int:
    """Run the script that the command line names; return the exit code."""
    return script.run(HELP, _prepare)


def _prepare() -> Launched:
    """Start MPI, set torchrun's variables and register the backend; return this rank."""
    from hpctrain.torch import autoload, ranks

    rank = ranks.set_variables()
    if not autoload.is_called_by_torch():
        autoload.register()
    return rank.job


if __name__ == "__main__":
    sys.exit(main())
