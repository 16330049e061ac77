"""Print the lowest versions that pyproject.toml admits, as requirements for pip: NAME==VERSION.

python tests/lowest_versions.py > lowest.txt && pip install -r lowest.txt
"""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.config import toml

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("datasets", "report")  # MPI's wheels are bound to the machine, CuPy's to a driver
OTHERS = ("ml_dtypes",)  #: of extras that need a GPU or PyTorch


def lowest_versions() -> dict[str, str]:
    """Return the lower bound of each dependency, and of those of EXTRAS and OTHERS, by name."""
    project = toml.parse(PROJECT.read_text(), str(PROJECT))["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    requirements += [line for line in extras["torch"] if line.startswith(OTHERS)]
    bounds = (re.fullmatch(r"([\w-]+)>=([\d.]+)(?:;.*)?", line) for line in requirements)
    return {match[1]: match[2] for match in bounds if match}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest_versions().items()))
