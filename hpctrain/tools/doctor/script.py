"""Traps of clusters in a user's script, which is read and not run: Python, or a job's shell script.

A Python script is read from its syntax tree, in the order of its lines: what stands further up is
taken to happen earlier.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core import files
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED
from hpctrain.hardware.pci import ROOT, read_text
from hpctrain.tools.doctor import traps
from hpctrain.tools.doctor.check import Check
from hpctrain.transport.device.gpus import VISIBLE_DEVICES

#: Libraries of files whose locks and threads do not survive a fork.
FILE_LIBRARIES = ("h5py", "zarr", "netCDF4")
#: Trackers that send data from the node, and what keeps them from it.
TRACKERS = {
    "wandb": "WANDB_MODE=offline, and `wandb sync` from a login node",
    "mlflow": "MLFLOW_TRACKING_URI=file:///shared/folder",
    "comet_ml": "comet_ml.OfflineExperiment",
    "neptune": "NEPTUNE_MODE=offline, and `neptune sync` from a login node",
    "swanlab": "SWANLAB_MODE=offline, and `swanlab sync` from a login node",
}
_OFFLINE_VARIABLES = ("WANDB_MODE", "NEPTUNE_MODE", "SWANLAB_MODE", "MLFLOW_TRACKING_URI")
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "FLUX_JOB_ID")
_FORK_IS_DEFAULT = sys.version_info < (3, 14)
_TORCHRUN_LINE = re.compile(
    r"\bsrun\b.*(?<![-\w])"
    r"(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)(?:\s|$)"
)


@dataclass(frozen=True)
class Machine:
    """What the checks of a script know of this node."""

    environ: Mapping[str, str]
    root: Path = ROOT

    @property
    def has_route(self) -> bool:
        """Whether packets have a way out of the node's own networks."""
        rows = read_text(self.root / "proc/net/route").splitlines()[1:]
        return any(row.split()[1:2] == ["00000000"] for row in rows)

    @property
    def is_in_job(self) -> bool:
        """Whether this process belongs to a job of a scheduler."""
        return any(name in self.environ for name in _JOB_VARIABLES)


def check_script(path: str, machine: Machine) -> list[Check]:
    """Return a check for each trap in the script `path`, else one that says there is none.

    Raises UsageError if it cannot be read, or is not Python.
    """
    text = files.read_text(path, files.MIB, NAMED)
    if path.endswith(".py"):
        try:
            checks = [*_check_python(_Reading.of(ast.parse(text)), machine)]
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"--script {path}: expected Python, seen: {error}") from None
    else:
        checks = [*_check_shell(text)]
    return checks or [Check("script", "ok", f"no known trap in {path}")]


def _check_shell(text: str) -> Iterator[Check]:
    for line in text.replace("\\\n", " ").splitlines():
        if match := _TORCHRUN_LINE.search(line.partition("#")[0]):
            observed = f"`{match[1]}` under srun: {traps.TORCHRUN_CAUSE}"
            yield Check("torchrun", "bad", observed, traps.TORCHRUN_REMEDY)
            return


@dataclass(frozen=True)
class _Reading:
    """The lines of a script at which it does what traps are made of."""

    imports: dict[str, int]  #: the first line of each module
    variables: dict[str, int]  #: the first line that sets each variable of the environment
    calls: list[ast.Call]

    @classmethod
    def of(cls, tree: ast.AST) -> _Reading:
        """Return the lines of a syntax tree."""
        nodes = sorted(
            (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)),
            key=lambda node: node.lineno,
        )
        imports: dict[str, int] = {}
        variables: dict[str, int] = {}
        for node in nodes:
            for module in _imported(node):
                imports.setdefault(module, node.lineno)
            for name in _set_variables(node):
                variables.setdefault(name, node.lineno)
        return cls(imports, variables, [node for node in nodes if isinstance(node, ast.Call)])

    def calls_of(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions with these last names."""
        return [call for call in self.calls if _name(call.func).rpartition(".")[2] in names]


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports, and for `from a import b` also a.b."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return []
    return [*dict.fromkeys([*names, *(name.partition(".")[0] for name in names)])]


def _set_variables(node: ast.AST) -> list[str]:
    """Return the variables that `os.environ[...] = ` or one of its methods sets."""
    if isinstance(node, ast.Assign):
        targets = [target for target in node.targets if isinstance(target, ast.Subscript)]
        keys = [target.slice for target in targets if _name(target.value).endswith("environ")]
    elif isinstance(node, ast.Call) and _name(node.func).endswith(("environ.setdefault", "putenv")):
        keys = node.args[:1]
    else:
        return []
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]


def _name(node: ast.AST) -> str:
    """Return a dotted name, such as "os.environ"; empty for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _keyword(call: ast.Call, name: str) -> ast.AST | None:
    return next((word.value for word in call.keywords if word.arg == name), None)


def _check_python(script: _Reading, machine: Machine) -> Iterator[Check]:
    yield from _check_import_order(script, machine)
    yield from _check_nccl(script, machine)
    yield from _check_forks(script)
    yield from _check_late_devices(script)
    yield from _check_trackers(script, machine)


def _check_import_order(script: _Reading, machine: Machine) -> Iterator[Check]:
    torch, mpi = script.imports.get("torch"), script.imports.get("mpi4py")
    if torch and mpi and torch < mpi and traps.has_slingshot(machine.root):
        yield Check(
            "imports", "bad",
            f"line {torch} imports torch before line {mpi} imports mpi4py: on Slingshot the "
            "libraries that torch loads first can break or hang MPI_Init",
            "import mpi4py first, or start the script by `python -m hpctrain.torch`, which does",
        )  # fmt: skip


def _check_nccl(script: _Reading, machine: Machine) -> Iterator[Check]:
    variable = traps.gpu_aware_variable(machine.environ)
    backends = [
        call.lineno
        for call in script.calls_of("init_process_group", "DDPStrategy", "new_group")
        for value in (*call.args, *(word.value for word in call.keywords))
        if isinstance(value, ast.Constant) and "nccl" in str(value.value)
    ]
    if variable and backends:
        yield Check(
            "GPU-aware MPI", "slow",
            f"line {backends[0]} uses NCCL, and {variable}=1 lets MPI use GPUs, too: together they "
            "can deadlock",
            f"export {variable}=0, or use the backend hpctrain",
        )  # fmt: skip


def _check_forks(script: _Reading) -> Iterator[Check]:
    libraries = [name for name in FILE_LIBRARIES if name in script.imports]
    safe = any(
        isinstance(value, ast.Constant) and value.value in ("spawn", "forkserver")
        for call in script.calls_of("set_start_method", "get_context", "DataLoader")
        for value in (*call.args, *(word.value for word in call.keywords))
    )
    workers = [
        call.lineno
        for call in script.calls_of("DataLoader")
        if (count := _keyword(call, "num_workers")) is not None
        and getattr(count, "value", None) != 0
        and _keyword(call, "multiprocessing_context") is None
    ]
    if libraries and workers and not safe and _FORK_IS_DEFAULT:
        yield Check(
            "forked workers", "bad",
            f"line {workers[0]} starts workers by fork, and line {script.imports[libraries[0]]} "
            f"imports {libraries[0]}: locks and threads of {libraries[0]} and MPI do not survive "
            "a fork, and workers hang or read wrong data",
            "DataLoader(..., multiprocessing_context='forkserver'), and open files in the worker",
        )  # fmt: skip


def _check_late_devices(script: _Reading) -> Iterator[Check]:
    line = script.variables.get(VISIBLE_DEVICES)
    starts = [(call.lineno, _name(call.func)) for call in script.calls if _is_init(call)]
    if "mpi4py.MPI" in script.imports:
        starts.append((script.imports["mpi4py.MPI"], "mpi4py.MPI"))
    if line and starts and min(starts)[0] < line:
        start, name = min(starts)
        yield Check(
            VISIBLE_DEVICES, "bad",
            f"line {line} sets it after line {start} ({name}) has started MPI: a GPU-aware MPI has "
            "chosen its GPU by then, and all ranks of a node may use one",
            "set it before MPI starts, or leave it out: torch.cuda.set_device(local_rank)",
        )  # fmt: skip


def _is_init(call: ast.Call) -> bool:
    return _name(call.func) in ("ht.init", "hpctrain.init", "hvd.init")


def _is_local(value: str) -> bool:
    """Return whether the value of a tracker's variable keeps its data on this machine."""
    return value not in ("", "online", "async", "sync") and not value.startswith("http")


def _check_trackers(script: _Reading, machine: Machine) -> Iterator[Check]:
    is_offline = any(
        name in script.variables or _is_local(machine.environ.get(name, ""))
        for name in _OFFLINE_VARIABLES
    ) or any(
        isinstance(mode, ast.Constant) and mode.value in ("offline", "disabled", "local")
        for call in script.calls_of("init")
        if (mode := _keyword(call, "mode")) is not None
    )
    for name in [name for name in TRACKERS if name in script.imports and not is_offline]:
        line = script.imports[name]
        if not machine.has_route:
            observed = f"line {line} imports {name}, and this node has no route to other networks"
            yield Check("tracker", "bad", f"{observed}: it waits or fails", TRACKERS[name])
        elif machine.is_in_job:
            observed = f"line {line} imports {name}: compute nodes may have no way to its server"
            yield Check("tracker", "note", observed, TRACKERS[name])
