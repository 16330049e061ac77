"""The verdict of trials: which path GPU memory takes for each class of pairs, and why.

A pure function of the trials, the state of GPUDirect RDMA and the environment: no job is started
and no file is read here (see jobs.py and verdicts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.core import thresholds
from hpctrain.hardware import gdr
from hpctrain.transport import paths
from hpctrain.transport.gpu_probe import jobs, mpi_claims
from hpctrain.transport.gpu_probe.jobs import ProbeTrial
from hpctrain.transport.paths import Verdict


@dataclass(frozen=True)
class ProbeResult:
    """A verdict, the remedy if a better path exists, and the trials behind the verdict."""

    verdict: Verdict
    remedy: str = ""
    trials: Mapping[str, ProbeTrial] = field(default_factory=dict)
    #: the classes in which MPI gets no pointers: untried, or refused despite the user's override
    unproven: tuple[str, ...] = ()


def decide_verdict(
    trials: Mapping[str, ProbeTrial], gdr_state: gdr.GdrState, environ: Mapping[str, str]
) -> ProbeResult:
    """Return the verdict of `trials`: for each class, the best path that worked."""
    choices = {name: _best_path(name, trials.get(name), gdr_state) for name in jobs.PAIR_CLASSES}
    failed_trial = next((trial for trial in trials.values() if not trial.pointer), None)
    if failed_trial is None:
        rates = ", ".join(
            f"{name.replace('_', ' ')} {trial.pointer_gb_s:.1f} GB/s"
            for name, trial in trials.items()
            if trial.pointer_gb_s
        )
        reason, remedy = f"device pointers arrived: {rates}", ""
        if choices["across"] == "cuda-aware":
            reason, remedy = f"{reason}; no GPUDirect RDMA: {gdr_state.evidence}", gdr_state.remedy
    else:
        reason, remedy = _explain_failure(failed_trial, environ)
    by_size = {name: _find_thresholds(choices[name], trial) for name, trial in trials.items()}
    by_size = {name: steps for name, steps in by_size.items() if steps}
    reason += "".join(f"; {_describe_thresholds(name, steps)}" for name, steps in by_size.items())
    seconds = {name: _min_times(choices[name], trial) for name, trial in trials.items()}
    seconds = {name: times for name, times in seconds.items() if times}
    ipc_rates = {name: trial.ipc_gb_s for name, trial in trials.items() if trial.ipc_gb_s}
    return ProbeResult(Verdict(**choices, reason=reason, by_size=by_size, seconds=seconds,
                        mapped_gb_s=ipc_rates), remedy, trials)  # fmt: skip


def _find_thresholds(path: paths.Path, trial: ProbeTrial) -> thresholds.Thresholds:
    """Return the size thresholds between staged and pointer; () without a choice."""
    if not _has_both_times(path, trial):
        return ()
    times = {n: {paths.POINTER: direct, paths.STAGED: staged} for n, staged, direct in trial.sizes}
    size_thresholds = thresholds.thresholds_from(times, paths.POINTER)
    return () if size_thresholds == ((0, paths.POINTER),) else size_thresholds


def _has_both_times(path: paths.Path, trial: ProbeTrial) -> bool:
    """Return whether messages may be staged or sent by pointer, and both were timed."""
    return path in paths.POINTER_PATHS and bool(trial.sizes)


def _min_times(path: paths.Path, trial: ProbeTrial) -> paths.MessageTimes:
    """Return the time of messages on the faster path, or on the only path."""
    if _has_both_times(path, trial):
        return tuple((n, min(seconds)) for n, *seconds in trial.sizes)
    return trial.staged


def _describe_thresholds(name: str, steps: thresholds.Thresholds) -> str:
    text = ", ".join(f"from {n:,} bytes on {path}" if n else path for n, path in steps)
    return f"{name.replace('_', ' ')} by size: {text}"


def _best_path(name: str, trial: ProbeTrial | None, gdr_state: gdr.GdrState) -> paths.Path:
    if trial is None or trial.claims is None:  # one GPU, one node, or no job started
        return "staged" if name == "across" else "ipc"
    if trial.pointer:
        return "gdr" if name == "across" and gdr_state.available else "cuda-aware"
    return "ipc" if trial.ipc else "staged"


def _explain_failure(trial: ProbeTrial, environ: Mapping[str, str]) -> tuple[str, str]:
    if trial.claims is None:
        return f"no trial could be made: {trial.ended}", "run `hpctrain doctor` in the job itself"
    reason, remedy = mpi_claims.find_fault(trial.claims, environ)
    if trial.cure:
        reason = "UCX's cache of memory types takes CuPy's GPU memory for memory of the host"
        remedy = f"export {trial.cure}: with it the trial succeeded"
    ipc_text = f"; CUDA IPC: {trial.ipc_fault}" if trial.ipc_fault else ""
    return f"{reason}; a device pointer given to MPI: {trial.ended}{ipc_text}", remedy
