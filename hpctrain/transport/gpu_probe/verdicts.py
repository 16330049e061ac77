"""The path of GPU memory on this machine: a trial job per class of pairs, and a cache of results.

    same GPU     mpiexec -n 2, both ranks on GPU 0
    same node    mpiexec -n 2, on GPUs 0 and 1                     where there are two
    across       srun -N 2 -n 2, a rank on each of two nodes       inside an allocation of two

`python -m hpctrain.transport.gpu_probe.verdicts` runs the missing trials and prints the verdict;
`hpctrain launch` and `hpctrain doctor` call it before a run. Ranks only read the cached verdict
(`cached_result`): their environment would break the MPI of a child, and the child theirs. The cache
is keyed by MPI build, driver, node image and the variables that matter.
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

from hpctrain.core import thresholds
from hpctrain.core.errors import UsageError
from hpctrain.core.thresholds import Thresholds
from hpctrain.hardware import gdr, nics, nvidia, pci
from hpctrain.transport import paths
from hpctrain.transport.device import gpus
from hpctrain.transport.gpu_probe import jobs, mpi_claims
from hpctrain.transport.gpu_probe.jobs import ProbeTrial
from hpctrain.transport.mpi import installation
from hpctrain.transport.paths import STAGED_VERDICT, Verdict

OVERRIDE = "HPCTRAIN_GPU_PATH"
CACHE = "XDG_CACHE_HOME"


@dataclass(frozen=True)
class ProbeResult:
    """A verdict, the remedy where it is not the best one, and the trials that led to it."""

    verdict: Verdict
    remedy: str = ""
    trials: Mapping[str, ProbeTrial] = field(default_factory=dict)
    #: the classes in which MPI gets no pointers for want of a trial, or against the user's wish
    unproven: tuple[str, ...] = ()


def cached_result(environ: Mapping[str, str]) -> ProbeResult:
    """Return the verdict for this process: the user's, else the cached one, else `STAGED`.

    MPI is loaded, not started. Raises UsageError if the user's variable makes no sense.
    """
    cached = _read(cache_file(environ)) or ProbeResult(STAGED_VERDICT, paths.TRIAL_REMEDY)
    untried = tuple(name for name in jobs.CLASSES if name not in cached.trials)
    cached = replace(cached, unproven=untried)
    override = environ.get(OVERRIDE, "")
    return apply_override(override, cached) if override else cached


def apply_override(override: str, cached: ProbeResult) -> ProbeResult:
    """Return the verdict of a user's `override`: "staged", "same_node=cuda-aware,across=gdr".

    MPI gets no pointers without evidence that it takes them, whatever the override says.
    """
    chosen = _parsed(override)
    failed_trials = [
        name
        for name, path in chosen.items()
        if path in paths.POINTER_PATHS and not _is_credible(name, cached.trials)
    ]
    chosen |= dict.fromkeys(failed_trials, "staged")
    remaining: dict[str, Any] = {
        of: {
            name: values
            for name, values in getattr(cached.verdict, of).items()
            if name not in chosen
        }
        for of in ("by_size", "seconds")
    }
    refused = f", refused for {', '.join(failed_trials)}" if failed_trials else ""
    reason = f"{OVERRIDE}={override}{refused}"
    verdict = replace(cached.verdict, **chosen, **remaining, reason=reason)
    unproven = (*failed_trials, *(name for name in cached.unproven if name not in chosen))
    return ProbeResult(
        verdict, paths.TRIAL_REMEDY if failed_trials else "", cached.trials, unproven
    )


def _is_credible(name: str, results: Mapping[str, ProbeTrial]) -> bool:
    """Return whether a user may select pointers for the class `name`.

    Yes if its trial succeeded, or if no trial failed and the MPI's own functions report CUDA.
    """
    if name in results and results[name].pointer:
        return True
    if any(trial.pointer is False for trial in results.values()):
        return False
    report = (
        next((trial.claims for trial in results.values() if trial.claims), None)
        or _claims_of_running_mpi()
    )
    return report is not None and report.reports_cuda


def _claims_of_running_mpi() -> mpi_claims.Claims | None:
    """Return the CUDA support that MPI reports in this rank; None where it was not started."""
    mpi = installation.loaded_mpi()
    from mpi4py import MPI  # loaded by now, and not started by that

    if not MPI.Is_initialized():
        return None
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return mpi_claims.query(mpi.vendor, mpi.libmpi, kinds)


def _parsed(override: str) -> dict[str, Any]:
    """Return the path of each class that `override` names; raise UsageError."""
    chosen: dict[str, Any] = dict.fromkeys(jobs.CLASSES, override) if "=" not in override else {}
    for entry in override.split(",") if "=" in override else ():
        name, _, path = entry.strip().partition("=")
        chosen[name] = path
    if chosen.get("across") == "ipc" and "=" not in override:
        chosen["across"] = "staged"  # no handle opens on another node
    for name, path in chosen.items():
        if name not in jobs.CLASSES or path not in _possible_paths(name):
            raise UsageError(
                f"{OVERRIDE}: expected one of {', '.join(get_args(paths.Path))}, or some of "
                f"{', '.join(f'{c}=PATH' for c in jobs.CLASSES)} (no ipc across), "
                f"seen '{override}'"
            )
    return chosen


def _possible_paths(name: str) -> tuple[str, ...]:
    return tuple(p for p in get_args(paths.Path) if (name, p) != ("across", "ipc"))


def probe(environ: Mapping[str, str], again: bool = False) -> ProbeResult:
    """Return the cached verdict, after the missing trials; never to be called in a rank.

    `again`: repeat all trials. The verdict is cached if all trials could be run.
    """
    try:
        visible = gpus.visible_gpus("gpu")
    except UsageError as error:
        return ProbeResult(replace(STAGED_VERDICT, reason=str(error)))
    file, mpi = cache_file(environ), installation.loaded_mpi()
    cached_trials = None if again else _read(file)
    results = dict(cached_trials.trials) if cached_trials else {}
    commands = jobs.jobs(
        installation.mpiexec(mpi), mpi.vendor, len(visible), _nodes(environ), environ
    )
    if not commands:
        return ProbeResult(
            replace(STAGED_VERDICT, reason="no mpiexec and no srun to start a trial with")
        )
    missing_commands = {name: line for name, line in commands.items() if name not in results}
    if missing_commands:
        message = f"probing the path of GPU memory, once ({', '.join(missing_commands)})"
        print(message.replace("_", " "), file=sys.stderr, flush=True)
    results |= {name: jobs.run(line, environ) for name, line in missing_commands.items()}
    result = judge(results, gdr.gdr_state(nics.read_nics()), environ)
    if all(trial.claims for trial in results.values()):
        _write(file, result)
    return result


def _nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of the allocation that this process is in."""
    count = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(count) if count.isdigit() else 1


def judge(
    results: Mapping[str, ProbeTrial], adapter: gdr.GdrState, environ: Mapping[str, str]
) -> ProbeResult:
    """Return the verdict that trials lead to: for each class the best path that worked."""
    chosen = {name: _path(name, results.get(name), adapter) for name in jobs.CLASSES}
    bad = next((trial for trial in results.values() if not trial.pointer), None)
    if bad is None:
        rates = ", ".join(
            f"{name.replace('_', ' ')} {trial.pointer_gb_s:.1f} GB/s"
            for name, trial in results.items()
            if trial.pointer_gb_s
        )
        reason, remedy = f"device pointers arrived: {rates}", ""
        if chosen["across"] == "cuda-aware":
            reason, remedy = f"{reason}; no GPUDirect RDMA: {adapter.evidence}", adapter.remedy
    else:
        reason, remedy = _explanation(bad, environ)
    by_size = {
        name: steps for name, trial in results.items() if (steps := _steps(chosen[name], trial))
    }
    reason += "".join(f"; {_description(name, steps)}" for name, steps in by_size.items())
    seconds = {
        name: times for name, trial in results.items() if (times := _shortest(chosen[name], trial))
    }
    ipc_rates = {name: trial.ipc_gb_s for name, trial in results.items() if trial.ipc_gb_s}
    return ProbeResult(Verdict(**chosen, reason=reason, by_size=by_size, seconds=seconds,
                        mapped_gb_s=ipc_rates), remedy, results)  # fmt: skip


def _steps(path: paths.Path, trial: ProbeTrial) -> Thresholds:
    """Return the size thresholds between staged and pointer; () where there is no choice."""
    if not _timed(path, trial):
        return ()
    times = {n: {paths.POINTER: direct, paths.STAGED: staged} for n, staged, direct in trial.sizes}
    steps = thresholds.thresholds_from(times, paths.POINTER)
    return () if steps == ((0, paths.POINTER),) else steps


def _timed(path: paths.Path, trial: ProbeTrial) -> bool:
    """Return whether messages may take either way, and both were timed."""
    return path in paths.POINTER_PATHS and bool(trial.sizes)


def _shortest(path: paths.Path, trial: ProbeTrial) -> paths.MessageTimes:
    """Return the seconds of messages on the faster path, or on the only one."""
    if _timed(path, trial):
        return tuple((n, min(seconds)) for n, *seconds in trial.sizes)
    return trial.staged


def _description(name: str, steps: Thresholds) -> str:
    text = ", ".join(f"from {n:,} bytes on {path}" if n else path for n, path in steps)
    return f"{name.replace('_', ' ')} by size: {text}"


def _path(name: str, trial: ProbeTrial | None, adapter: gdr.GdrState) -> paths.Path:
    if trial is None or trial.claims is None:  # one GPU, one node, or no job that started
        return "staged" if name == "across" else "ipc"
    if trial.pointer:
        return "gdr" if name == "across" and adapter.available else "cuda-aware"
    return "ipc" if trial.ipc else "staged"


def _explanation(trial: ProbeTrial, environ: Mapping[str, str]) -> tuple[str, str]:
    if trial.claims is None:
        return f"no trial could be made: {trial.ended}", "run `hpctrain doctor` in the job itself"
    reason, remedy = mpi_claims.fault(trial.claims, environ)
    ipc_text = f"; CUDA IPC: {trial.ipc_fault}" if trial.ipc_fault else ""
    return f"{reason}; a device pointer given to MPI: {trial.ended}{ipc_text}", remedy


def cache_file(environ: Mapping[str, str], root: Path = pci.ROOT) -> Path:
    """Return the cache file of the verdict for this MPI, driver, image and environment."""
    mpi = installation.loaded_mpi()
    facts = (
        *(mpi.vendor, mpi.version, mpi.libmpi),
        nvidia.driver_version(root),
        pci.read_text(root / "etc/os-release"),
        pci.read_text(root / "proc/sys/kernel/osrelease"),
        mpi_claims.relevant(environ, mpi.libmpi),
    )
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    cached, home = environ.get(CACHE, ""), os.path.expanduser("~")  # itself where there is none
    cache = Path(cached) if os.path.isabs(cached) else Path(home) / ".cache"
    return cache / "hpctrain" / "gpu-paths" / f"{key}.json"


def _read(file: Path) -> ProbeResult | None:
    try:
        return from_json(file.read_text())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or an older one's
        return None


def from_json(text: str) -> ProbeResult:
    """Return the verdict of a text that `asdict` and `json.dumps` made."""
    fields = json.loads(text)
    results = {name: jobs.from_table(trial) for name, trial in fields["trials"].items()}
    return ProbeResult(paths.verdict_from_table(fields["verdict"]), fields["remedy"], results)


def _write(file: Path, result: ProbeResult) -> None:
    """Write a verdict to its cache file atomically; warn where it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(result)))
        temporary.replace(file)
    except OSError as error:
        print(
            f"the verdict cannot be cached in {file.parent} ({error.strerror}), so ranks will not "
            f"use it: set {CACHE} to a folder that all nodes see and you may write",
            file=sys.stderr,
        )


def main() -> None:
    """Print the verdict as a line of JSON; `--again` repeats the trials."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # its trial ends, too
    try:
        print(json.dumps(asdict(probe(os.environ, "--again" in sys.argv[1:]))))
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
