"""`python -m hpctrain.torch SCRIPT`: a script made for torchrun on the ranks of MPI."""

from __future__ import annotations

import sys

from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.transport import abort

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
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        say(HELP, end="", err=not words)
        return 0 if words else UsageError.exit_code
    from hpctrain.torch import autoload, ranks, runner

    try:
        runner.check(words)
        rank = ranks.set_variables()
    except UsageError as error:
        return abort.refuse(error, str(error))
    if not autoload.is_called_by_torch():
        autoload.register()
    runner.run(words, rank)
    return 0


if __name__ == "__main__":
    sys.exit(main())
