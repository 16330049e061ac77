"""A study and its folder; one process at a time may write there.

DIR/study.json               the request, and the values decided once: batch, steps, threads
DIR/recipes/SIZE.toml        the recipe of each size, made for timing
DIR/trials/SIZE/repeat-0/    the run of `hpctrain train`; beside it repeat-0.log, its output
DIR/links/SIZE/link.json     single messages between two ranks, of `hpctrain bench p2p`
DIR/pilots/SIZE/             short runs that measured how long a step takes
DIR/scaling.{json,csv,png,svg}, time.{png,svg}, report.html      derived from the files above
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pydantic

from hpctrain.core import atomic, files, opening
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import folder_lock
from hpctrain.tools.scaling.trial_recipe import PositiveInt, Size, Timing, ranks_per_core

STUDY_FILE, FORMAT_VERSION = "study.json", 1
MAX_REPEATS = 10_000  #: a larger number means a damaged file
MAX_FILE_BYTES = 16 << 20  #: of study.json; each size needs some hundred bytes
#: A study with other values in these fields is another study.
IDENTITY_FIELDS = ("name", "mode", "on", "link", "tables", "machine")


TrialKey = tuple[int, Size]  #: a trial: its repeat and its size


@dataclass(frozen=True)
class Study:
    """One recipe on several sizes; `steps` is None until a pilot has measured their time."""

    name: str
    mode: str  #: strong or weak
    on: str  #: local, netlab or slurm
    link: str | None  #: of a netlab
    sizes: Annotated[tuple[Size, ...], pydantic.Field(min_length=1)]
    repeats: Annotated[int, pydantic.Field(ge=1, le=MAX_REPEATS)]
    tables: dict[str, Any]  #: the recipe as the user has it
    batch: PositiveInt  #: global in strong scaling, per worker in weak scaling
    gradient_bytes: int
    machine: dict[str, Any]  #: facts; with Slurm about the login node
    threads: PositiveInt | None = None  #: BLAS threads of a rank; None: Slurm decides
    cores: PositiveInt | None = None  #: shared by all sizes; None if each node has its own
    steps: PositiveInt | None = None  #: timed steps per trial
    job: dict[str, Any] = field(default_factory=dict)  #: options of Slurm's jobs

    @property
    def timing(self) -> Timing:
        """The length of a trial."""
        return Timing.of(self.steps or 0)

    @property
    def trials(self) -> list[TrialKey]:
        """All trials in the order of execution: repeat by repeat, all sizes in each."""
        return [(repeat, size) for repeat in range(self.repeats) for size in self.sizes]

    @property
    def by_nodes(self) -> bool:
        """Whether to name sizes by nodes: all nodes have the same number of ranks, > 1."""
        return len({s.per_node for s in self.sizes}) == 1 and self.sizes[0].per_node > 1

    @property
    def pipe(self) -> int:
        """The ranks that hold a replica together."""
        return int(self.tables.get("mesh", {}).get("pipe", 1))

    def share(self, size: Size) -> float:
        """Return the number of ranks per core at `size`; 1 if each rank has its own core."""
        return ranks_per_core(size, self.cores, self.threads or 1)


class StudyFolder:
    """The folder of a study."""

    def __init__(self, path: Path):
        self.path = path

    def trial(self, size: Size, repeat: int) -> Path:
        """Return the folder of a trial."""
        return self.path / "trials" / size.name / f"repeat-{repeat}"

    def pilot(self, size: Size) -> Path:
        """Return the folder of a short run that measures the time of a step."""
        return self.path / "pilots" / size.name

    def link(self, size: Size) -> Path:
        """Return the folder with times of single messages between two ranks of `size`."""
        return self.path / "links" / size.name

    def recipe(self, size: Size, text: str) -> Path:
        """Write the recipe of `size`; return its path."""
        path = self.path / "recipes" / f"{size.name}.toml"
        self.make_folders_of(path)
        atomic.replace(path, text, levels=2)
        return path

    def make_folders_of(self, path: Path) -> None:
        """Make the folders of the study above `path`; raise UsageError where one is a link."""
        with _faults_named():
            for folder in [*path.relative_to(self.path).parents][-2::-1]:
                opening.make_folder(self.path / folder, len(folder.parts))

    def make_room(self, *outs: Path) -> None:
        """Remove the folders of an earlier trial, and create their parent folders.

        Raises UsageError where one is a link, which may lead out of the study.
        """
        for out in outs:
            self.make_folders_of(out)
            with _faults_named():
                opening.remove_folder(out, len(out.relative_to(self.path).parts))

    def save(self, study: Study) -> None:
        """Write study.json atomically."""
        text = json.dumps({"format": FORMAT_VERSION, **asdict(study)}, indent=1)
        atomic.replace(self.path / STUDY_FILE, text + "\n")

    def load(self) -> Study | None:
        """Return the stored study; None if the folder has none yet."""
        path = self.path / STUDY_FILE
        return read_study(path) if path.exists() else None


@contextmanager
def _faults_named() -> Iterator[None]:
    """Turn an OSError into the UsageError that names its file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None


def read_study(path: Path) -> Study:
    """Read study.json at `path`; raise UsageError if it is damaged."""
    try:
        document = files.read_json_object(path, MAX_FILE_BYTES)
    except files.FileError as error:
        raise UsageError(f"{error}; name a new folder with --out") from None
    if document.pop("format", None) != FORMAT_VERSION:
        raise UsageError(f"{path}: made by another version; name a new folder with --out")
    try:
        return _STUDY_READER.validate_json(json.dumps(document), strict=True)
    except pydantic.ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"]))
        raise UsageError(
            f"{path}: {key}: {first_error['msg'].lower()}; name a new folder with --out"
        ) from None


@contextmanager
def lock_folder(path: Path) -> Iterator[StudyFolder]:
    """Create and lock the folder of a study; the kernel releases the lock when the process ends.

    Raises UsageError if something else lies there or if it cannot be written, LockedError if
    another process holds it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = sorted(
            path_entry.name for path_entry in path.iterdir() if path_entry.name != folder_lock.LOCK
        )
        if names and STUDY_FILE not in names:
            raise UsageError(f"--out {path} is not the folder of a study: it holds {names[0]}, ...")
        lock_fd = folder_lock.lock_folder(path)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from None
    try:
        yield StudyFolder(path)
    finally:
        os.close(lock_fd)


def extend_study(requested: Study, stored_study: Study | None, out: Path) -> Study:
    """Return `stored_study` with the sizes and repeats that `requested` adds to it.

    Raises UsageError where the folder `out` holds another study.
    """
    if stored_study is None:
        return requested
    for name in IDENTITY_FIELDS:
        old_value, new_value = (
            json.loads(json.dumps(getattr(study, name))) for study in (stored_study, requested)
        )
        if old_value != new_value:
            raise UsageError(
                f"--out {out} holds another study: "
                f"{_describe_difference(name, old_value, new_value)}. Name a new folder, or "
                "request the same study"
            )
    if requested.steps not in (None, stored_study.steps):
        raise UsageError(
            f"--out {out} holds another study: trials of {stored_study.steps} timed steps, now "
            f"{requested.steps}. Name a new folder, or leave out --steps"
        )
    sizes = tuple(sorted({*stored_study.sizes, *requested.sizes}))
    repeats = max(stored_study.repeats, requested.repeats)
    return replace(stored_study, sizes=sizes, repeats=repeats, job=requested.job)


def _describe_difference(name: str, old_value: Any, new_value: Any) -> str:
    if not isinstance(old_value, dict):
        return f"{name} was {old_value}, now {new_value}"
    keys = sorted(
        changed_key
        for changed_key in old_value.keys() | new_value.keys()
        if old_value.get(changed_key) != new_value.get(changed_key)
    )
    return "; ".join(
        f"{name}.{changed_key} was {old_value.get(changed_key)}, now {new_value.get(changed_key)}"
        for changed_key in keys[:3]
    )


_STUDY_READER = pydantic.TypeAdapter(Study)
