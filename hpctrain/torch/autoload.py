"""The entry point that PyTorch calls at its import: registers the name "hpctrain", and no more.

PyTorch turns any exception here into a failure of `import torch` for the whole environment, so none
leaves `register`; nothing of MPI is loaded, and no environment variable is set. With
HPCTRAIN_TORCH=0 nothing is registered.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

BACKEND = "hpctrain"
DISABLING_VARIABLE = "HPCTRAIN_TORCH"


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
        handlers = rendezvous._rendezvous_handlers
        _replace_env_handler(handlers)
    except Exception:
        return


def _replace_env_handler(handlers: dict[str, Any]) -> None:
    """Let `env://` ask MPI where no other rendezvous is given; see rendezvous.py."""
    env_handler = handlers["env"]

    def handle(url: str, **options: Any) -> Any:
        from hpctrain.torch import rendezvous

        if rendezvous.is_ours(url, os.environ):
            return rendezvous.over_mpi(**options)
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
