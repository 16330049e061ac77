"""The file system on which a path lies, from /proc/mounts, and whether it is one of a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from hpctrain.hardware.pci import ROOT, read_text

NFS = ("nfs", "nfs4")
NETWORK_KINDS = (
    *NFS, "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb3", "afs", "pvfs2",
    "dvs", "fuse.sshfs", "fuse.glusterfs",
)  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: its folder, and its kind as the kernel names it."""

    folder: str
    kind: str

    @property
    def is_of_network(self) -> bool:
        """Whether other machines serve it."""
        return self.kind in NETWORK_KINDS


def find_mount(path: Path, root: Path = ROOT) -> Mount:
    """Return the file system of an absolute `path`; its kind is empty if it is unknown."""
    mount = Mount("/", "")
    for line in read_text(root / "proc/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        folder = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[1])
        # A later mount on the same folder hides the earlier one.
        if path.is_relative_to(folder) and len(folder) >= len(mount.folder):
            mount = Mount(folder, fields[2])
    return mount
