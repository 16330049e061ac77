"""What is published: the source distribution, the wheel built from it, and their metadata."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from email import message_from_string
from pathlib import Path

import pytest
from checkout import ROOT, copy, tracked_files

import hpctrain as ht
from hpctrain.core.config import toml

ADDRESS = "https://host.example/owner/hpctrain"
PAGE = "man/man1/hpctrain.1"  #: that `make dist` writes
PROJECT = toml.parse((ROOT / "pyproject.toml").read_text(), "pyproject.toml")["project"]


@pytest.fixture(scope="module")
def repository():
    return tracked_files()


def build(folder: Path, **variables: str) -> Path:
    """Build the source distribution of `folder`, and the wheel from that; return their folder."""
    command = [sys.executable, "-m", "build", "--no-isolation", "."]
    env = {**os.environ, **variables}
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, timeout=100)
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(repository, tmp_path_factory):
    folder = copy(repository, tmp_path_factory.mktemp("published"))
    (folder / PAGE).parent.mkdir(parents=True)
    (folder / PAGE).write_text(".TH HPCTRAIN 1\n")
    return build(folder, HPCTRAIN_URL=ADDRESS + "/")


def contents(dist: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in dist.iterdir()}


def metadata_of(dist: Path):
    (wheel,) = dist.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = f"hpctrain-{ht.__version__}.dist-info/METADATA"
        return message_from_string(archive.read(name).decode())


def unpack(dist: Path, folder: Path) -> Path:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        # Python 3.10.11 and 3.11.3 have no filters yet, and 3.12 warns without one.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_large_files_of_the_repository_are_compressed(repository):
    """Every clone has them, in every version."""
    packed = (".gz", ".npz", ".png")
    large = {name for name in repository if (ROOT / name).stat().st_size > 200_000}
    assert [name for name in large if not name.endswith(packed)] == []


@pytest.mark.processes
@pytest.mark.either
def test_a_source_distribution_holds_all_files_of_the_repository(repository, dist, tmp_path):
    folder = unpack(dist, tmp_path)
    packed = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert packed == repository | {"PKG-INFO", PAGE}


@pytest.mark.processes
@pytest.mark.either
def test_a_wheel_installs_man_pages(dist):
    (wheel,) = dist.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = [name for name in archive.namelist() if ".data/" in name]
    assert installed == [f"hpctrain-{ht.__version__}.data/data/share/{PAGE}"]


@pytest.mark.processes
@pytest.mark.either
def test_builds_of_a_source_distribution_give_its_own_bytes(dist, tmp_path):
    """Elsewhere, later, and without the address: its metadata have it."""
    folder = unpack(dist, tmp_path)
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
        file.chmod(file.stat().st_mode | 0o066)
    assert contents(build(folder, HPCTRAIN_URL="")) == contents(dist)


@pytest.mark.processes
@pytest.mark.either
def test_links_of_the_description_lead_to_files_of_the_tag(repository, dist):
    metadata = metadata_of(dist)
    addresses = [line.partition(", ")[2] for line in metadata.get_all("Project-URL")]
    addresses += re.findall(r"\]\((.*?)\)", metadata.get_payload())
    at_tag = re.compile(rf"{ADDRESS}/(?:blob|raw)/v{re.escape(ht.__version__)}/([^#]*)(#.*)?")
    leading_elsewhere = {ADDRESS, f"{ADDRESS}/issues"}
    targets = [at_tag.fullmatch(x) for x in addresses if x not in leading_elsewhere]
    assert len(targets) > 30 and {match and match[1] for match in targets} <= repository
    assert f"]({ADDRESS}/raw/v{ht.__version__}/benchmarks/results/" in metadata.get_payload()


@pytest.mark.processes
@pytest.mark.either
def test_without_an_address_the_description_is_the_readme(repository, tmp_path):
    metadata = metadata_of(build(copy(repository, tmp_path), HPCTRAIN_URL=""))
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata.get_all("Project-URL") is None


def test_every_dependency_is_listed_with_its_extras_and_a_licence():
    extras = defaultdict(set)
    for name, lines in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for line in lines:
            extras[re.match(r"[\w-]+", line)[0]].add(name)
    del extras["hpctrain"]  # an extra made of others
    notices = (ROOT / "THIRD-PARTY.md").read_text()
    table = re.findall(r"^\| ([\w-]+) \| (.*?)\|(.*)\|$", notices, re.MULTILINE)
    listed = {name: set(names.strip().split(", ")) for name, names, _ in table[1:]}
    assert listed == extras
    assert all(licence.strip() for _, _, licence in table)


def test_the_citation_has_the_version():
    assert f"\nversion: {ht.__version__}\n" in (ROOT / "CITATION.cff").read_text()
