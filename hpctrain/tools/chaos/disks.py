"""Disks that are full, or fail at the n-th operation on a file."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from pathlib import Path

from hpctrain.tools.chaos.case import FailingFile

SOURCE = Path(__file__).with_name("failing.c")
ROOM_KIB = 1 << 16


def build(folder: Path) -> Path:
    """Compile failing.c into `folder`, unless it is there; return the library."""
    library = folder / "failing.so"
    if not library.exists():
        fresh = Path(tempfile.mkdtemp(dir=folder)) / library.name  # others may build it too
        options = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        command: list[str | Path] = ["cc", *options, "-o", fresh, SOURCE, "-ldl"]
        subprocess.run(command, check=True)
        fresh.rename(library)
        fresh.parent.rmdir()
    return library


def environment(fault: FailingFile, library: Path, run: Path, report: Path) -> dict[str, str]:
    """Return the variables under which the ranks of a job meet `fault` in the folder `run`."""
    effect = errno.__dict__.get(fault.effect, fault.effect)
    words = [fault.rank, fault.operation, fault.number, effect, int(fault.stays), report, run]
    return {"LD_PRELOAD": str(library), "CAMPAIGN_DISK": " ".join(map(str, words))}


def mount(folder: Path, kib: int) -> None:
    """Make `folder` a file system of `kib` KiB in memory; it goes with the mount namespace."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kib}k", "campaign"]
    subprocess.run(["mount", *options, folder], check=True)


def resize(folder: Path, kib: int = ROOM_KIB) -> None:
    """Change the size of a file system that `mount` made, but not below what lies there."""
    disk = os.statvfs(folder)
    kib = max(kib, (disk.f_blocks - disk.f_bfree) * disk.f_frsize >> 10)
    subprocess.run(["mount", "-o", f"remount,size={kib}k", folder], check=True)
