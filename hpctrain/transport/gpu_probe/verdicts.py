"""The path of GPU memory on this machine: a trial job per class of pairs, and a cache of results.

    same GPU     mpiexec -n 2, both ranks on GPU 0
    same node    mpiexec -n 2, on GPUs 0 and 1                     on nodes with two GPUs
    across       srun -N 2 -n 2, a rank on each of two nodes       in an allocation of two nodes

`python -m hpctrain.transport.gpu_probe.verdicts` runs the missing trials and prints the verdict;
`hpctrain launch` and `hpctrain doctor` call it before a run. Ranks only read the cached verdict
(`cached_result`): inside a rank, a child that starts MPI would fail and disturb the rank. The cache
is keyed by MPI build, driver, node image and the relevant variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from hpctrain.core import atomic, files
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED
from hpctrain.core.printing import say
from hpctrain.hardware import gdr, nics, nvidia, pci
from hpctrain.transport import paths
from hpctrain.transport.device import gpus
from hpctrain.transport.gpu_probe import jobs, mpi_claims
from hpctrain.transport.gpu_probe.decision import ProbeResult, decide_verdict
from hpctrain.transport.gpu_probe.jobs import ProbeTrial
from hpctrain.transport.mpi import installation
from hpctrain.transport.paths import STAGED_VERDICT

OVERRIDE_VARIABLE = "HPCTRAIN_GPU_PATH"
CACHE_VARIABLE = "XDG_CACHE_HOME"


def cached_result(environ: Mapping[str, str]) -> ProbeResult:
    """Return the verdict for this process: the user's, else the cached one, else `STAGED_VERDICT`.

    MPI is loaded, not started. Raises UsageError if the user's variable is invalid.
    """
    cached = _read_cache(cache_file(environ)) or ProbeResult(STAGED_VERDICT, paths.TRIAL_REMEDY)
    cached = replace(cached, unproven=tuple(n for n in jobs.PAIR_CLASSES if n not in cached.trials))
    override = environ.get(OVERRIDE_VARIABLE, "")
    return apply_override(override, cached) if override else cached


def apply_override(override: str, cached: ProbeResult) -> ProbeResult:
    """Return the verdict of a user's `override`: "staged", "same_node=cuda-aware,across=gdr".

    MPI gets no pointers without evidence that it accepts them, even if the override asks for them.
    """
    choices = _parse_override(override)
    failed_trials = [
        name
        for name, path in choices.items()
        if path in paths.POINTER_PATHS and not _may_use_pointers(name, cached.trials)
    ]
    choices |= dict.fromkeys(failed_trials, "staged")
    tables: tuple[Mapping[str, Any], ...] = (cached.verdict.by_size, cached.verdict.seconds)
    by_size, seconds = (
        {name: rows for name, rows in table.items() if name not in choices} for table in tables
    )
    refusal = f", refused for {', '.join(failed_trials)}" if failed_trials else ""
    reason = f"{OVERRIDE_VARIABLE}={override}{refusal}"
    verdict = replace(cached.verdict, **choices, by_size=by_size, seconds=seconds, reason=reason)
    unproven = (*failed_trials, *(name for name in cached.unproven if name not in choices))
    remedy = paths.TRIAL_REMEDY if failed_trials else ""
    return ProbeResult(verdict, remedy, cached.trials, unproven)


def _may_use_pointers(name: str, trials: Mapping[str, ProbeTrial]) -> bool:
    """Return whether a user may select pointers for the class `name`.

    True if its trial succeeded, or if no trial failed and the MPI's own functions report CUDA.
    """
    if name in trials and trials[name].pointer:
        return True
    if any(trial.pointer is False for trial in trials.values()):
        return False
    trial_claims = next((trial.claims for trial in trials.values() if trial.claims), None)
    claims = trial_claims or _claims_of_running_mpi()
    return claims is not None and claims.reports_cuda


def _claims_of_running_mpi() -> mpi_claims.MpiClaims | None:
    """Return the CUDA support that MPI reports in this rank; None before MPI_Init."""
    mpi = installation.load_mpi()
    from mpi4py import MPI  # the import does not start MPI

    if not MPI.Is_initialized():
        return None
    kinds = MPI.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds") or ""
    return mpi_claims.query_claims(mpi.vendor, mpi.libmpi, kinds)


def _parse_override(override: str) -> dict[str, Any]:
    """Return {class of pairs: path} from `override`; raise UsageError."""
    choices: dict[str, Any] = {}
    if "=" in override:
        for entry in override.split(","):
            name, _, path = entry.strip().partition("=")
            choices[name] = path
    else:
        choices = dict.fromkeys(jobs.PAIR_CLASSES, override)
        if override == "ipc":
            choices["across"] = "staged"  # IPC handles do not open on another node
    names, valid_paths = jobs.PAIR_CLASSES, get_args(paths.Path)
    for name, path in choices.items():
        if name not in names or path not in valid_paths or (name, path) == ("across", "ipc"):
            raise UsageError(
                f"{OVERRIDE_VARIABLE}: expected one of {', '.join(valid_paths)}, or some of "
                f"{', '.join(f'{name}=PATH' for name in names)} (no ipc across), seen '{override}'"
            )
    return choices


def probe(environ: Mapping[str, str], repeat_trials: bool = False) -> ProbeResult:
    """Run the trials missing in the cache and return the verdict; never call this in a rank.

    `repeat_trials`: repeat all trials. The verdict is cached if all trials could be run.
    """
    try:
        visible_gpus = gpus.visible_gpus("gpu")
    except UsageError as error:
        return ProbeResult(replace(STAGED_VERDICT, reason=str(error)))
    file, mpi = cache_file(environ), installation.load_mpi()
    cached_trials = None if repeat_trials else _read_cache(file)
    trials = dict(cached_trials.trials) if cached_trials else {}
    node_count = environ.get("SLURM_JOB_NUM_NODES", "")
    nodes = int(node_count) if node_count.isdigit() else 1  # without Slurm
    commands = jobs.trial_commands(
        installation.find_mpiexec(mpi), mpi.vendor, len(visible_gpus), nodes, environ
    )
    if not commands:
        return ProbeResult(replace(STAGED_VERDICT, reason="no mpiexec and no srun for a trial"))
    missing_commands = {name: command for name, command in commands.items() if name not in trials}
    if missing_commands:
        message = f"probing the path of GPU memory, once ({', '.join(missing_commands)})"
        say(message.replace("_", " "), err=True)
    trials |= {
        name: jobs.run_trial_and_cure(command, environ)
        for name, command in missing_commands.items()
    }
    result = decide_verdict(trials, gdr.gdr_state(nics.read_nics()), environ)
    if all(trial.claims for trial in trials.values()):
        _write_cache(file, result)
    return result


def cache_file(environ: Mapping[str, str], root: Path = pci.ROOT) -> Path:
    """Return the cache file of the verdict for this MPI, driver, image and environment."""
    mpi = installation.load_mpi()
    facts = (
        *(mpi.vendor, mpi.version, mpi.libmpi),
        nvidia.driver_version(root),
        pci.read_text(root / "etc/os-release"),
        pci.read_text(root / "proc/sys/kernel/osrelease"),
        mpi_claims.relevant_variables(environ, mpi.libmpi),
    )
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
    cached, home = (
        environ.get(CACHE_VARIABLE, ""),
        os.path.expanduser("~"),
    )  # stays "~" without a home
    cache = Path(cached) if os.path.isabs(cached) else Path(home) / ".cache"
    return cache / "hpctrain" / "gpu-paths" / f"{key}.json"


def _read_cache(file: Path) -> ProbeResult | None:
    try:
        return result_from_json(files.read_text(file, files.MIB, NAMED))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ):  # no file, or an older version wrote it
        return None


def result_from_json(text: str) -> ProbeResult:
    """Return the result from the JSON text of its `asdict`."""
    fields = json.loads(text)
    trials = {name: jobs.trial_from_table(trial) for name, trial in fields["trials"].items()}
    return ProbeResult(paths.verdict_from_table(fields["verdict"]), fields["remedy"], trials)


def _write_cache(file: Path, result: ProbeResult) -> None:
    """Write a result to its cache file atomically; warn if it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace(file, json.dumps(asdict(result)))
    except OSError as error:
        say(
            f"the verdict cannot be cached in {file.parent} ({error.strerror}), so ranks will not "
            f"use it: set {CACHE_VARIABLE} to a folder that all nodes see and you may write",
            err=True,
        )


def main() -> None:
    """Print the verdict as a line of JSON; `--again` repeats the trials."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the running trial ends, too
    try:
        say(json.dumps(asdict(probe(os.environ, "--again" in sys.argv[1:]))))
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
