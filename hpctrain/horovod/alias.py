"""`import horovod` in a script that is run as it is: hpctrain.horovod under another name.

    horovod.torch                    hpctrain.horovod.torch, the same module
    horovod.torch.mpi_ops, ...       the module of ours that has their names
    horovod.tensorflow, ...          an ImportError that says what to do

`search_path/` has a package `horovod`, which calls `install`. A process that multiprocessing
starts, as for a DataLoader, inherits the sys.path of its parent, and so finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

from hpctrain import horovod
from hpctrain.core import launchers
from hpctrain.core.printing import say

NAME = "horovod"
SEARCH_PATH = str(Path(__file__).parent / "search_path")
#: modules of Horovod that have no file here: ours has their public names
SAME_NAMES = {
    "horovod.common": "hpctrain.horovod.torch",
    "horovod.common.elastic": "hpctrain.horovod.torch.elastic",
    "horovod.common.exceptions": "hpctrain.horovod.torch",
    "horovod.common.util": "hpctrain.horovod.torch",
    "horovod.torch.mpi_ops": "hpctrain.horovod.torch",
}


def install() -> None:
    """Let `import horovod` find hpctrain.horovod from now on, in this process.

    Rank 0 names a Horovod that is installed and therefore not used.
    """
    if sys.modules.get(NAME) is horovod:
        return
    sys.modules[NAME] = horovod
    sys.meta_path.insert(0, _Finder())
    spec = PathFinder.find_spec(NAME, [folder for folder in sys.path if folder != SEARCH_PATH])
    origin = spec and spec.origin  # none of a folder that is no package
    is_child = multiprocessing.parent_process() is not None
    if origin and not is_child and launchers.launched(os.environ).rank == 0:
        say(
            f"hpctrain: `import horovod` is hpctrain.horovod here; {origin} is not used",
            err=True,
        )


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of Horovod, and loads a module of ours in the place of each."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for any module below `horovod`."""
        return spec_from_loader(name, self) if name.startswith(f"{NAME}.") else None

    def exec_module(self, module: ModuleType) -> None:
        """Put our module in the place of `module`, which the import then returns."""
        from importlib import import_module

        name = module.__name__
        own = SAME_NAMES.get(name, f"hpctrain.{name}")
        try:
            sys.modules[name] = import_module(own)
        except ModuleNotFoundError as error:
            if error.name != own:
                raise
            raise ModuleNotFoundError(
                f"no module {name!r}: of Horovod, hpctrain has what a script of PyTorch imports; "
                "see docs/horovod.md",
                name=name,
            ) from None
