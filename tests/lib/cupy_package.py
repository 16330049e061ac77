"""A package `cupy` for child processes: the stand-in for CuPy, with two GPUs.

Installed by `install` in a folder for PYTHONPATH, with nvml.py as `pynvml`. FAKE_GPUS says how many
GPUs there are. With FAKE_CRASH set their pointers lead nowhere: an MPI that touches them crashes,
as one that knows nothing of GPUs does. With FAKE_IPC=refused no handle is to be had, as in some
containers.
"""

from __future__ import annotations

from pathlib import Path

LIB = Path(__file__).parent
SOURCE = """
import os, sys

sys.path += {folders!r}
import fakes

fakes.kept = fakes.installed(
    devices=int(os.environ.get("FAKE_GPUS", "2")),
    hidden=bool(os.environ.get("FAKE_CRASH")),
    ipc=os.environ.get("FAKE_IPC") != "refused",
)
fakes.kept.__enter__()  # which puts itself in this module's place
"""


NVML = """
import sys

sys.path += {folders!r}
import nvml
globals().update(nvml.functions())
"""


def install(folder: Path) -> Path:
    """Write `cupy` and a `pynvml` below `folder`, which is to be on the path; return `folder`."""
    (folder / "pynvml").mkdir(parents=True)
    folders = [str(LIB.parent), str(LIB)]
    (folder / "pynvml" / "__init__.py").write_text(NVML.format(folders=folders))
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(SOURCE.format(folders=folders))
    return folder
