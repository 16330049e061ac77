"""The entry point that PyTorch calls at its import: registers the name "hpctrain".

Rank 0 of several also gets a hook for its first optimizer step, see independent.py.

PyTorch turns any exception here into a failure of `import torch` for the whole environment, so none
leaves `register`; nothing of MPI is loaded, and no environment variable is set. With
HPCTRAIN_TORCH=0 nothing is registered.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import entry_points
from typing import Any

BACKEND = "hpctrain"
DISABLING_VARIABLE = "HPCTRAIN_TORCH"
#: With these, the steps of the script are recorded: see script_steps.py.
RECORDING_VARIABLES = {"HPCTRAIN_TRACE", "HPCTRAIN_TRIAL"}


def register() -> None:
    """Register the backend and the rendezvous of `env://`, once; never raises."""
    if os.environ.get(DISABLING_VARIABLE) == "0":
        return
    try:
        # `torch.distributed.rendezvous` is also the name of a function of that package.
        rendezvous = importlib.import_module("torch.distributed.rendezvous")
        from torch.distributed import Backend

        if BACKEND in Backend.backend_list:
            return
        Backend.register_backend(
            BACKEND, _make_process_group, extended_api=True, devices=["cpu", "cuda"]
        )
        _replace_env_handler(rendezvous._rendezvous_handlers)
        from hpctrain.torch import independent

        independent.watch_training(os.environ)
        if RECORDING_VARIABLES & os.environ.keys():
            from hpctrain.torch import script_steps

            script_steps.watch(os.environ)
    except Exception:
        return


def is_called_by_torch() -> bool:
    """Return whether PyTorch will call `register` when a script imports it."""
    enabled = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    return enabled and any(point.name == BACKEND for point in entry_points(group="torch.backends"))


def _replace_env_handler(handlers: dict[str, Any]) -> None:
    """Let `env://` ask MPI where it has the ranks; see rendezvous.py."""
    env_handler = handlers["env"]

    def handle(url: str, **options: Any) -> Any:
        from hpctrain.core.errors import UsageError
        from hpctrain.torch import rendezvous
        from hpctrain.world import report_without_traceback

        try:
            choice = rendezvous.choose_ranks(url)
        except UsageError as error:
            report_without_traceback(error)
            raise
        if choice.source == "mpi":
            return rendezvous.over_mpi(choice, **options)
        return env_handler(url, **options)

    handlers["env"] = handle


def _make_process_group(backend_options: Any, user_options: Any) -> Any:
    """Return the process group that `init_process_group` or `new_group` asks for; collective."""
    from hpctrain.core.errors import UsageError
    from hpctrain.torch.process_group import make_process_group
    from hpctrain.world import report_without_traceback

    try:
        return make_process_group(backend_options)
    except UsageError as error:
        report_without_traceback(error)
        raise
