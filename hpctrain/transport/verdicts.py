"""Which way GPU memory takes here: trials in jobs of their own, one per class of pairs, remembered.

    same GPU     mpiexec -n 2, both ranks on GPU 0
    same node    mpiexec -n 2, on GPUs 0 and 1                     where there are two
    across       srun -N 2 -n 2, a rank on each of two nodes       inside an allocation of two

`python -m hpctrain.transport.verdicts` makes the trials that are missing and prints the result;
`hpctrain launch` and `hpctrain doctor` call it before a run. Ranks only read what was remembered
(`known`): their environment would break the MPI of a child, and the child theirs. What is
remembered belongs to an MPI build, a driver, a node image and the variables that matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from hpctrain import stairs
from hpctrain.errors import UsageError
from hpctrain.hardware import gdr, nics, nvidia, pci
from hpctrain.stairs import Steps
from hpctrain.transport import claims, gpus, paths, probe, trials
from hpctrain.transport.paths import STAGED, Verdict
from hpctrain.transport.trials import Trial

OVERRIDE = "HPCTRAIN_GPU_PATH"
CACHE = "XDG_CACHE_HOME"
UNTRIED = "run `hpctrain doctor` once, in a job on such nodes"


@dataclass(frozen=True)
class Told:
    """A verdict, what helps where it is not the best one, and the trials it was made from."""

    verdict: Verdict
    remedy: str = ""
    trials: Mapping[str, Trial] = field(default_factory=dict)
    #: the classes in which MPI gets no pointers for want of a trial, or against the user's wish
    unproven: tuple[str, ...] = ()


def known(environ: Mapping[str, str]) -> Told:
    """Return the verdict for this process: the user's, else the remembered one, else `STAGED`.

    MPI is loaded, not started. Raises UsageError if the user's variable makes no sense.
    """
    remembered = _read(file_of(environ)) or Told(STAGED, UNTRIED)
    untried = tuple(name for name in trials.CLASSES if name not in remembered.trials)
    remembered = replace(remembered, unproven=untried)
    asked = environ.get(OVERRIDE, "")
    return overridden(asked, remembered) if asked else remembered


def overridden(asked: str, otherwise: Told) -> Told:
    """Return what a user asks for: "staged", or "same_node=cuda-aware,across=gdr".

    Where nothing speaks for it that MPI takes pointers, it gets none, whatever was asked.
    """
    wanted = _wanted(asked)
    refused = [
        name
        for name, path in wanted.items()
        if path in paths.BY_POINTER and not _believed(name, otherwise.trials)
    ]
    wanted |= dict.fromkeys(refused, "staged")
    kept: dict[str, Any] = {
        of: {
            name: one for name, one in getattr(otherwise.verdict, of).items() if name not in wanted
        }
        for of in ("by_size", "seconds")
    }
    reason = f"{OVERRIDE}={asked}" + (f", refused for {', '.join(refused)}" if refused else "")
    verdict = replace(otherwise.verdict, **wanted, **kept, reason=reason)
    unproven = (*refused, *(name for name in otherwise.unproven if name not in wanted))
    return Told(verdict, UNTRIED if refused else "", otherwise.trials, unproven)


def _believed(name: str, made: Mapping[str, Trial]) -> bool:
    """Return whether a user who wants pointers for a class may have them.

    A trial showed it; or there was none that failed, and the MPI's own functions are sure.
    """
    if name in made and made[name].pointer:
        return True
    if any(one.pointer is False for one in made.values()):
        return False
    said = next((one.claims for one in made.values() if one.claims), None) or _claimed()
    return said is not None and said.sure


def _claimed() -> claims.Claims | None:
    """Return what the MPI says of itself in this rank; None where it was not started."""
    mpi = probe.loaded_mpi()
    from mpi4py import MPI  # loaded by now, and not started by that

    if not MPI.Is_initialized():
        return None
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return claims.asked(mpi.vendor, mpi.libmpi, kinds)


def _wanted(asked: str) -> dict[str, Any]:
    """Return the path of each class that is asked for; raise UsageError."""
    wanted: dict[str, Any] = dict.fromkeys(trials.CLASSES, asked) if "=" not in asked else {}
    for one in asked.split(",") if "=" in asked else ():
        name, _, path = one.strip().partition("=")
        wanted[name] = path
    if wanted.get("across") == "ipc" and "=" not in asked:
        wanted["across"] = "staged"  # no handle opens on another node
    for name, path in wanted.items():
        if name not in trials.CLASSES or path not in _possible(name):
            raise UsageError(
                f"{OVERRIDE}: expected one of {', '.join(get_args(paths.Path))}, or some of "
                f"{', '.join(f'{c}=PATH' for c in trials.CLASSES)} (no ipc across), seen '{asked}'"
            )
    return wanted


def _possible(name: str) -> tuple[str, ...]:
    return tuple(p for p in get_args(paths.Path) if (name, p) != ("across", "ipc"))


def find(environ: Mapping[str, str], again: bool = False) -> Told:
    """Return what is remembered, after the trials that are missing; never to be called in a rank.

    `again`: all trials are made anew. What is found is remembered, if the trials could be made.
    """
    try:
        seen = gpus.visible("gpu")
    except UsageError as error:
        return Told(replace(STAGED, reason=str(error)))
    file, mpi = file_of(environ), probe.loaded_mpi()
    before = None if again else _read(file)
    made = dict(before.trials) if before else {}
    commands = trials.jobs(probe.mpiexec(mpi), mpi.vendor, len(seen), _nodes(environ), environ)
    if not commands:
        return Told(replace(STAGED, reason="no mpiexec and no srun to start a trial with"))
    missing = {name: line for name, line in commands.items() if name not in made}
    if missing:
        said = f"trying which way GPU memory takes here, once ({', '.join(missing)})"
        print(said.replace("_", " "), file=sys.stderr, flush=True)
    made |= {name: trials.run(line, environ) for name, line in missing.items()}
    told = judged(made, gdr.gdr(nics.nics()), environ)
    if all(trial.claims for trial in made.values()):
        _write(file, told)
    return told


def _nodes(environ: Mapping[str, str]) -> int:
    """Return on how many nodes the allocation lies that this process is in."""
    told = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(told) if told.isdigit() else 1


def judged(made: Mapping[str, Trial], adapter: gdr.Gdr, environ: Mapping[str, str]) -> Told:
    """Return the verdict that trials lead to: for each class the best path that worked."""
    found = {name: _path(name, made.get(name), adapter) for name in trials.CLASSES}
    bad = next((one for one in made.values() if not one.pointer), None)
    if bad is None:
        rates = ", ".join(
            f"{name.replace('_', ' ')} {one.pointer_gb_s:.1f} GB/s"
            for name, one in made.items()
            if one.pointer_gb_s
        )
        reason, remedy = f"device pointers arrived: {rates}", ""
        if found["across"] == "cuda-aware":
            reason, remedy = f"{reason}; no GPUDirect RDMA: {adapter.seen}", adapter.remedy
    else:
        reason, remedy = _why(bad, environ)
    by_size = {name: steps for name, one in made.items() if (steps := _steps(found[name], one))}
    reason += "".join(f"; {_in_words(name, steps)}" for name, steps in by_size.items())
    seconds = {name: best for name, one in made.items() if (best := _best(found[name], one))}
    mapped = {name: one.ipc_gb_s for name, one in made.items() if one.ipc_gb_s}
    return Told(Verdict(**found, reason=reason, by_size=by_size, seconds=seconds,
                        mapped_gb_s=mapped), remedy, made)  # fmt: skip


def _steps(path: paths.Path, trial: Trial) -> Steps:
    """Return from which length on which way was faster; nothing where there is no choice."""
    if not _timed(path, trial):
        return ()
    times = {n: {paths.POINTER: by, paths.HOST: staged} for n, staged, by in trial.sizes}
    steps = stairs.steps(times, paths.POINTER)
    return () if steps == ((0, paths.POINTER),) else steps


def _timed(path: paths.Path, trial: Trial) -> bool:
    """Return whether messages may take either way, and both were timed."""
    return path in paths.BY_POINTER and bool(trial.sizes)


def _best(path: paths.Path, trial: Trial) -> paths.Seconds:
    """Return what messages take that go the faster way, or the only one."""
    if _timed(path, trial):
        return tuple((n, min(both)) for n, *both in trial.sizes)
    return trial.staged


def _in_words(name: str, steps: Steps) -> str:
    told = ", ".join(f"from {start:,} bytes on {way}" if start else way for start, way in steps)
    return f"{name.replace('_', ' ')} by size: {told}"


def _path(name: str, trial: Trial | None, adapter: gdr.Gdr) -> paths.Path:
    if trial is None or trial.claims is None:  # one GPU, one node, or no job that started
        return "staged" if name == "across" else "ipc"
    if trial.pointer:
        return "gdr" if name == "across" and adapter.available else "cuda-aware"
    return "ipc" if trial.ipc else "staged"


def _why(trial: Trial, environ: Mapping[str, str]) -> tuple[str, str]:
    if trial.claims is None:
        return f"no trial could be made: {trial.ended}", "run `hpctrain doctor` in the job itself"
    reason, remedy = claims.fault(trial.claims, environ)
    refused = f"; CUDA IPC: {trial.ipc_fault}" if trial.ipc_fault else ""
    return f"{reason}; a device pointer given to MPI: {trial.ended}{refused}", remedy


def file_of(environ: Mapping[str, str], root: Path = pci.ROOT) -> Path:
    """Return where the verdict of this MPI, driver, image and environment is remembered."""
    mpi = probe.loaded_mpi()
    facts = (
        *(mpi.vendor, mpi.version, mpi.libmpi),
        nvidia.driver(root),
        pci.read(root / "etc/os-release"),
        pci.read(root / "proc/sys/kernel/osrelease"),
        claims.relevant(environ, mpi.libmpi),
    )
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    cached, home = environ.get(CACHE, ""), os.path.expanduser("~")  # itself where there is none
    cache = Path(cached) if os.path.isabs(cached) else Path(home) / ".cache"
    return cache / "hpctrain" / "gpu-paths" / f"{key}.json"


def _read(file: Path) -> Told | None:
    try:
        return from_json(file.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or an older one's
        return None


def from_json(text: str) -> Told:
    """Return what `asdict` and `json.dumps` made a text of."""
    said = json.loads(text)
    made = {name: trials.from_table(one) for name, one in said["trials"].items()}
    return Told(paths.from_table(said["verdict"]), said["remedy"], made)


def _write(file: Path, told: Told) -> None:
    """Remember a verdict, whole or not at all; where it cannot be written, say so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(asdict(told)))
        aside.replace(file)
    except OSError as error:
        print(
            f"what was found cannot be remembered in {file.parent} ({error.strerror}), and ranks "
            f"will not know it: let {CACHE} name a folder that all nodes see and you may write",
            file=sys.stderr,
        )


def main() -> None:
    """Print the verdict as a line of JSON; `--again` makes the trials anew."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its trial ends, too
    try:
        print(json.dumps(asdict(find(os.environ, "--again" in sys.argv[1:]))))
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
