"""`python -m hpctrain.horovod SCRIPT`: a script of Horovod on the ranks of MPI, as it is."""

from __future__ import annotations

import os
import sys

from hpctrain.core import launchers
from hpctrain.horovod import alias
from hpctrain.transport import script

HELP = """\
usage: python -m hpctrain.horovod SCRIPT [ARGS]...
       python -m hpctrain.horovod -m MODULE [ARGS]...
       python -m hpctrain.horovod -c CODE [ARGS]...

Run a script that says `import horovod.torch as hvd` on the ranks that mpirun or
srun has started, as it is: the import returns hpctrain.horovod.torch, also in
the workers of a DataLoader, and where Horovod is installed. MPI is started
before the script. An error on any rank ends the job.

examples:
  mpirun -n 4 python -m hpctrain.horovod train.py --epochs 3
  srun -N 2 --ntasks-per-node=4 python -m hpctrain.horovod train.py
  hpctrain launch -n 4 -- python -m hpctrain.horovod train.py
  hpctrain-horovodrun -np 4 python train.py       (finds the names by itself)
"""


def main() -> int:
    """Run the script that the command line names; return the exit code."""
    return script.run(HELP, _prepare)


def _prepare() -> launchers.Launched:
    """Put hpctrain.horovod in the place of Horovod, and start MPI; return this rank."""
    from hpctrain.world.process import start_before_script

    alias.install()
    sys.path.insert(1, alias.SEARCH_PATH)  # the first is the script's folder
    job = launchers.launched(os.environ)
    comm = start_before_script(job)
    rank = launchers.Launched(job.name, comm.rank, comm.size, job.local_rank, job.local_size)
    comm.Free()
    return rank


if __name__ == "__main__":
    sys.exit(main())
