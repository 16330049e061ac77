"""Hooks of hatchling: metadata that depend on the address of the repository, and man pages.

HPCTRAIN_URL gives the address at a release. To install: `pip install .`

A package index shows the README without the files beside it. So its links lead to the files of the
version's tag, at the addresses that GitHub and GitLab give them. A source distribution keeps these
metadata, and builds of it do not read the variable.

Man pages are files of no commit: `make dist` writes them into the source distribution.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"(!\[[^]]*\]\()(?!https?:)")
LINK = re.compile(r"(\]\()(?!https?:|#)")


class RepositoryMetadata(MetadataHookInterface):
    """Set `readme`, and with an address `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        if address := os.environ.get("HPCTRAIN_URL", "").rstrip("/"):
            tag = f"v{metadata['version']}"
            files = f"{address}/blob/{tag}"
            text = IMAGE.sub(rf"\1{address}/raw/{tag}/", text)
            text = LINK.sub(rf"\1{files}/", text)
            metadata["urls"] = {
                "Source": address,
                "Documentation": f"{files}/docs/README.md",
                "Changes": f"{files}/CHANGES.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class ManPages(BuildHookInterface):
    """Install the man pages that are there where `man` looks for those of a program."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        pages = sorted((Path(self.root) / "man" / "man1").glob("*.1"))
        build_data["shared_data"] = {str(page): f"share/man/man1/{page.name}" for page in pages}
