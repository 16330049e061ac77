"""`python -m fakes ARGS`: the command line of hpctrain on a machine with stand-ins for GPUs.

HPCTRAIN_FAKES holds the options of `fakes.installed`, as JSON.
"""

import json
import os

import fakes

if __name__ == "__main__":
    with fakes.installed(**json.loads(os.environ.get("HPCTRAIN_FAKES", "{}"))):
        from hpctrain.cli import main

        main()
