"""The tuning table: measurements of `hpctrain tune` as a JSON file, and its location.

    ~/.cache/hpctrain/tuning/open-mpi-4-ranks-3f9c2a117b04.json
                             MPI      ranks   hash of the fingerprint

A table belongs to a fingerprint: CPU, cores, placement of ranks on nodes, MPI. It is valid only as
long as the algorithms are those that were measured. A table that does not fit is ignored, with one
warning: a choice can then be slow, but never wrong. Only rank 0 reads and writes these files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain import collectives
from hpctrain.collectives import Group
from hpctrain.core import atomic
from hpctrain.core.errors import HpctrainError, UsageError
from hpctrain.core.files import FileError, brief, read_bytes
from hpctrain.core.opening import NAMED
from hpctrain.transport import machine
from hpctrain.tuning import choose
from hpctrain.tuning.gpu_layout import GpuLayout
from hpctrain.tuning.model import cost

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
MAX_FILE_BYTES = 64 << 20  #: of a file; a row has some hundred bytes
FILE_VARIABLE = "HPCTRAIN_TUNING"  #: environment: another file, or another folder of tables
CPU_DEVICE = "cpu"
ADVICE = "make one with: hpctrain launch -n RANKS tune"


@cache
def hash_sources() -> str:
    """Return the hash of the algorithms' sources: times of other versions are not valid."""
    sources = sorted(Path(collectives.__path__[0]).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@dataclass(frozen=True)
class Fingerprint:
    """The machine and the ranks of a measurement."""

    cpu: str
    cores: int
    cores_per_rank: int  #: those on which rank 0 may run
    mpi: str  #: vendor and version
    layout: str  #: see `describe_layout`
    device: str = CPU_DEVICE  #: of the arrays; for GPUs the model, and the ranks on each
    paths: str = ""  #: of messages from GPU memory

    @property
    def on_gpu(self) -> bool:
        """Whether arrays lie on GPUs."""
        return self.device != CPU_DEVICE

    @property
    def file_name(self) -> str:
        """The name of the table's file: readable, and different for all that differ."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        words = self.mpi.rsplit(maxsplit=1)[0].lower().split()
        gpu_words = ["gpu"] if self.on_gpu else []
        return "-".join((*words, *self.layout.split()[:2], *gpu_words, digest)) + ".json"

    @property
    def advice(self) -> str:
        """The command that makes such a table."""
        return ADVICE + " --device gpu" * self.on_gpu


@dataclass(frozen=True)
class Table:
    """All measurements that a run of `hpctrain tune` made."""

    fingerprint: Fingerprint
    rows: list[choose.AlgorithmTime]
    buckets: list[tuple[choose.ByteCount, choose.PositiveFloat]]  #: (bytes, seconds per byte)
    node: cost.Machine | None = None  #: between two ranks of a node
    across: cost.Machine | None = None  #: between two ranks of different nodes
    noisy: choose.NonNegativeFloat | None = (
        None  #: how far repeats lay apart, if too far: see `choose.noisy`
    )
    algorithms: str = field(default_factory=hash_sources)
    versions: dict[str, str] = field(default_factory=machine.versions)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    schema: int = SCHEMA_VERSION


class TableError(HpctrainError):
    """A table that cannot be used; the text gives the reason."""


def describe_layout(nodes: Sequence[Sequence[int]], unit_name: str = "node") -> str:
    """Return the placement of ranks in words: `4 ranks on 2 nodes: 0 1, 2 3`, shortened by hash."""
    text = ", ".join(" ".join(map(str, ranks)) for ranks in nodes)
    if len(text) > 60:
        sizes = sorted({len(ranks) for ranks in nodes})
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        text = f"{sizes[0]} to {sizes[-1]} each, {digest}"
    nodes_text = f"{len(nodes)} {unit_name}{'s' * (len(nodes) > 1)}"
    return f"{sum(map(len, nodes))} ranks on {nodes_text}: {text}"


def make_fingerprint(group: Group, mpi: bool, gpus: GpuLayout | None = None) -> Fingerprint:
    """Return this rank's fingerprint of `group`, of arrays on `gpus` if given."""
    nodes = group.nodes or (tuple(range(group.link.size)),)
    mpi_version = machine.mpi() if mpi else "threads none"
    cores = os.cpu_count() or 1
    gpu_facts = (
        (f"{gpus.model}, {describe_layout(gpus.ranks_by_gpu, 'GPU')}", gpus.paths) if gpus else ()
    )
    return Fingerprint(
        _cpu_model(),
        cores,
        len(os.sched_getaffinity(0)),
        mpi_version,
        describe_layout(nodes),
        *gpu_facts,
    )


@cache
def _cpu_model() -> str:
    return machine.cpu()


def table_folder() -> Path:
    """Return the folder of tables, unless HPCTRAIN_TUNING overrides it."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    # The standard: a path that is not absolute is to be ignored.
    cache_folder = Path(cache_home) if os.path.isabs(cache_home) else Path.home() / ".cache"
    return cache_folder / "hpctrain" / "tuning"


def default_file(fingerprint: Fingerprint) -> Path:
    """Return the path of the table of `make_fingerprint`, which need not exist."""
    setting = os.environ.get(FILE_VARIABLE)
    path = Path(setting) if setting else table_folder()
    return path / fingerprint.file_name if not setting or path.is_dir() else path


def newest_file(ranks: int, on_gpu: bool = False) -> Path:
    """Return the file with the newest table of this CPU, for `ranks` ranks if more than one.

    For arrays on GPUs, or in the memory of the host.

    Raises UsageError if there is none.
    """
    setting = os.environ.get(FILE_VARIABLE)
    root = Path(setting) if setting else table_folder()
    if setting and not root.is_dir():
        return root
    paths = [path for path in root.glob("*.json") if _fits_this_machine(path, ranks, on_gpu)]
    if not paths:
        suffix = f" of {ranks} ranks" * (ranks > 1) + " on GPUs" * on_gpu
        advice = ADVICE + " --device gpu" * on_gpu
        raise UsageError(f"there is no tuning table{suffix} of this machine in {root}; {advice}")
    return max(paths, key=lambda path: path.stat().st_mtime)


def _fits_this_machine(path: Path, ranks: int, on_gpu: bool) -> bool:
    try:
        fingerprint = read_table(path).fingerprint
    except TableError:
        return False
    same_size = ranks == 1 or fingerprint.layout.startswith(f"{ranks} ranks ")
    return fingerprint.cpu == _cpu_model() and fingerprint.on_gpu == on_gpu and same_size


def find_table(group: Group, mpi: bool, gpus: GpuLayout | None = None) -> Table | None:
    """Return the table that fits `group`, else None; warn of a table that does not fit.

    A file for the other kind of memory counts as none: the user names one file for both.
    """
    current = make_fingerprint(group, mpi, gpus)
    path = default_file(current)
    try:
        if not path.exists() and (current.on_gpu or os.environ.get(FILE_VARIABLE) != str(path)):
            return None  # no table is required, or the host's call warns of the file
        table = read_table(path)
        return check_fit(table, current) if table.fingerprint.on_gpu == current.on_gpu else None
    except TableError as error:
        log.warning("tuning table %s is ignored: %s", path, error)
        return None


def check_fit(table: Table, current: Fingerprint) -> Table:
    """Return `table` if machine and algorithms are the `current` ones; else raise TableError."""
    for fact in fields(Fingerprint):
        recorded_value, current_value = (
            getattr(facts, fact.name) for facts in (table.fingerprint, current)
        )
        if recorded_value != current_value:
            raise TableError(
                f"its {fact.name} is {brief(recorded_value)}, here it is {brief(current_value)}; "
                f"{current.advice}"
            )
    if table.algorithms != hash_sources():
        raise TableError(f"it was made for other algorithms than this hpctrain's; {current.advice}")
    return table


def read_table(path: Path) -> Table:
    """Return the table in file `path`; raise TableError if it is missing or unusable."""
    try:
        return parse_table(read_bytes(path, MAX_FILE_BYTES, NAMED))
    except FileError as error:
        raise TableError(f"{str(error).removeprefix(f'{path}: ')}; {ADVICE}") from None


def parse_table(text: bytes) -> Table:
    """Return the table parsed from `text`; raise TableError if it is damaged or not our version."""
    import pydantic  # takes 50 ms, and most programs have no table

    try:
        content: Any = json.loads(text)
        schema = content.get("schema")
    except (ValueError, AttributeError, RecursionError):
        raise TableError(f"it is damaged; {ADVICE}") from None
    if schema != SCHEMA_VERSION:
        raise TableError(
            f"its schema is {brief(schema)}, this hpctrain reads {SCHEMA_VERSION}; {ADVICE}"
        )
    try:
        table: Table = pydantic.TypeAdapter(Table).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        first_error = error.errors()[0]
        location = brief(".".join(map(str, first_error["loc"]))).strip("'")
        raise TableError(
            f"it is damaged: {location}: {first_error['msg'].lower()}; {ADVICE}"
        ) from None
    for name in ("node", "across"):
        times: cost.Machine | None = getattr(table, name)
        for key, value in asdict(times).items() if times else ():
            if not 0 <= value < math.inf:
                raise TableError(
                    f"it is damaged: {name}.{key}: expected seconds, seen {value}; {ADVICE}"
                )
    return table


def write_table(table: Table, path: Path) -> None:
    """Write `table` to file `path` atomically; raise UsageError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace(path, json.dumps(asdict(table), indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"the table cannot be written to {path}: {error.strerror}") from None


def plan_from_table(table: Table) -> choose.TuningPlan:
    """Return the plan of `table`: thresholds and buckets."""
    return choose.make_plan(table.rows, tuple(table.buckets), measured=True)
