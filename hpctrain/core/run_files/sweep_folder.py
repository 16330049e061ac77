"""The folder of a sweep: sweep.json, and a run's folder for each member below it.

DIR/sweep.json       the recipe, the settings, and of each member its folder's name and its values
DIR/rate=0.1/        a run; see run_folder.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.files import FileError
from hpctrain.core.run_files import run_folder, schemas

SWEEP = "sweep.json"
_RUN_FILES = (run_folder.RECIPE, run_folder.METRICS, run_folder.SUMMARY)
Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]*$")]


@dataclass(frozen=True)
class Member:
    """A run of a sweep: the name of its folder, and its values as texts in TOML."""

    name: Name
    values: dict[str, str]


@dataclass(frozen=True)
class SweepFile:
    """The contents of sweep.json."""

    recipe: str  #: a built-in one, or the absolute path of a file
    settings: list[str]  #: `table.key=value`, as on the command line
    members: Annotated[list[Member], pydantic.Field(min_length=1)]
    #: The folder in which relative paths of `settings` begin.
    folder: str = field(default_factory=os.getcwd)

    def is_same(self, other: SweepFile) -> bool:
        """Return whether both have the same recipe, settings and members."""
        return asdict(self) | {"folder": ""} == asdict(other) | {"folder": ""}


def is_sweep(folder: Path) -> bool:
    """Return whether `folder` is a sweep's."""
    return (folder / SWEEP).is_file()


def read(folder: Path) -> SweepFile:
    """Return the sweep in `folder`; raise FileError if there is none."""
    path = folder / SWEEP
    entries = files.read_json_object(path, run_folder.SUMMARY_BYTES)
    try:
        return pydantic.TypeAdapter(SweepFile).validate_python(entries)
    except pydantic.ValidationError as error:
        raise FileError(f"{path}: {schemas.first_fault(error)}") from None


def must_fit(folder: Path, sweep: SweepFile) -> None:
    """Raise UsageError if `folder` holds another sweep, or a run."""
    if is_sweep(folder) and not (earlier := read(folder)).is_same(sweep):
        words = " ".join([earlier.recipe, *(f"--set {setting}" for setting in earlier.settings)])
        raise UsageError(f"{folder} holds another sweep, of {words}: name another --out")
    if any((folder / name).exists() for name in _RUN_FILES):
        raise UsageError(f"{folder} holds a run, not a sweep: name another --out")


def write(folder: Path, sweep: SweepFile) -> None:
    """Write sweep.json whole or not at all, unless it is there; raise UsageError."""
    if not is_sweep(folder):
        with run_folder.writable(folder):
            run_folder.write_json(folder / SWEEP, asdict(sweep))


def find(folder: Path) -> Iterator[Path]:
    """Yield the folders of sweeps in `folder`, the one that began last first."""
    paths: list[Any] = [path for path in folder.glob("*") if is_sweep(path)]
    yield from sorted(paths, key=lambda path: (path / SWEEP).stat().st_mtime, reverse=True)


def is_done(run: Path) -> bool:
    """Return whether the run of a member has come to its end."""
    return (run_folder.read_summary(run) or {}).get("status") == "done"
