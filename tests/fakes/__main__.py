"""`python -m fakes ARGS`: the command line of hpctrain on a machine with stand-ins for GPUs.

HPCTRAIN_FAKES holds the options of `fakes.installed`, as JSON. Under "ranks" it may have others for
some ranks, by their number; with "cupy": null there is none.
"""

import json
import os
import sys
from contextlib import nullcontext
from importlib import import_module

import fakes
from hpctrain.core import launchers
from hpctrain.transport.device import gpus


def options() -> dict:
    """Return the options of this rank."""
    result = json.loads(os.environ.get("HPCTRAIN_FAKES", "{}"))
    own = result.pop("ranks", {}).get(str(launchers.launched(os.environ).rank), {})
    return {**result, **own}


def machine():
    """Return the context in which hpctrain is to run."""
    requested = options()
    if "cupy" in requested:
        sys.modules["cupy"] = requested.pop("cupy")
        return nullcontext(fakes.Machine(**requested))
    if launchers.launched(os.environ).size > 1:
        import_module("hpctrain.transport.mpi.link")  # so that its messages are watched
    return fakes.installed(**requested)


if __name__ == "__main__":
    with machine() as stand_in:
        gpus.driver_cuda_version = lambda: stand_in.driver or None  # whose library is not here
        from hpctrain.cli import main

        main()
