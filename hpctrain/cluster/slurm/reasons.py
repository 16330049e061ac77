"""Slurm's reasons why a job does not start or has ended, and their meanings."""

from __future__ import annotations

import re

_RELEASE_COMMAND = "scontrol release it"
_WAITING_MEANINGS = {
    "AccountNotAllowed": "the partition is not for this account: name another",
    "BadConstraints": "no node satisfies the constraints of the job",
    "BeginTime": "its start time has not come yet",
    "BurstBufferOperation": "its burst buffer could not be prepared",
    "BurstBufferResources": "waits for a burst buffer",
    "BurstBufferStageIn": "its burst buffer is being prepared",
    "Cleaning": "Slurm first cleans up its nodes after its last run",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job on which it depends failed: scancel this one",
    "InvalidAccount": "you may not use this account here: scancel the job, and name another",
    "InvalidQOS": "this QOS does not exist: scancel the job, and name another",
    "JobArrayTaskLimit": "the sizes of an array run one after the other",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": f"held: {_RELEASE_COMMAND}",
    "JobHoldMaxRequeue": f"held by Slurm after too many requeues: {_RELEASE_COMMAND}",
    "Licenses": "waits for a license",
    "MaxMemPerLimit": "it asks for more memory per node or core than the limit: ask for less",
    "Nodes_required_for_job_are_DOWN": "too few nodes are up and not reserved",
    "PartitionConfig": "it exceeds the limits of the partition: ask for less, or name another",
    "PartitionDown": "the partition starts no jobs now",
    "PartitionInactive": "the partition accepts and starts no jobs now",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "Priority": "other jobs come first",
    "Prolog": "the site prepares its nodes",
    "QOSNotAllowed": "the account or the partition does not allow this QOS: name another",
    "QOSUsageThreshold": "the account has used more than the share that this QOS requires",
    "ReqNodeNotAvail": "nodes are down, drained or reserved",
    "Reservation": "its reservation has not begun yet",
    "ReservationDeleted": "its reservation was deleted: scancel it",
    "Resources": "waits for nodes to become free",
    "SchedDefer": "Slurm has not considered it yet",
    "WaitingForScheduling": "Slurm has not considered it yet",
    "job_requeued_in_held_state": f"held: {_RELEASE_COMMAND}",
    "launch_failed_requeued_held": f"held since its nodes could not start it: {_RELEASE_COMMAND}",
}
#: Reasons why a job has ended; the reasons for waiting no longer apply then.
_END_MEANINGS = {
    "DeadLine": "it could not end before its deadline",
    "DependencyNeverSatisfied": "the job on which it depends failed",
    "InactiveLimit": "it was inactive for too long",
    "JobLaunchFailure": "its nodes could not start it: a file system, or the nodes themselves",
    "NodeDown": "one of its nodes is down",
    "NonZeroExitCode": "its script ended with an error",
    "OutOfMemory": "one of its nodes ran out of memory",
    "RaisedSignal": "its script was ended by a signal",
    "SystemFailure": "Slurm, a file system or the network has failed",
    "TimeLimit": "its time was over",
}
#: Reasons that name a limit of a QOS or an account, as patterns; the first match counts.
_LIMIT_MEANINGS = {
    r"(QOS|Assoc)Grp\w*(?<!Run)Minutes\w*": "the {} has used up its time",
    r"(QOS|Assoc)\w*PerJob\w*": "it asks for more than the {} allows per job: ask for less",
    r"(QOS|Assoc)Min(?!utes)\w*": "it asks for less than the minimum of the {}: ask for more",
    r"(QOS|Assoc)\w*": "all jobs together reach a limit of the {}: wait, or ask for less",
}

#: Reasons that waiting does not resolve: somebody has to change the job or the cluster.
_PERMANENT_REASONS = {"BadConstraints", "DependencyNeverSatisfied", "PartitionNodeLimit",
            "PartitionTimeLimit", "QOSNotAllowed"}  # fmt: skip


def is_permanent(reason: str) -> bool:
    """Return whether a job with this reason will never start by itself."""
    first_word = _first_word(reason)
    return (
        first_word in _PERMANENT_REASONS
        or re.fullmatch(r"(QOS|Assoc)\w*PerJob\w*", first_word) is not None
    )


def explain_reason(reason: str, restarts: int | None = None) -> str:
    """Return Slurm's reason, followed by its meaning if that is known.

    `restarts` is the number of requeues, after which BeginTime has another meaning.
    """
    first_word = _first_word(reason)
    meaning = (
        _WAITING_MEANINGS.get(first_word)
        or _END_MEANINGS.get(first_word)
        or _explain_limit(first_word)
    )
    if first_word == "BeginTime" and restarts:
        meaning = "Slurm waits two minutes after a requeue"
    return f"{reason}: {meaning}" if meaning else reason


def explain_end_reason(reason: str) -> str:
    """Return the reason of an ended job and its meaning; "" for a reason to wait."""
    meaning = _END_MEANINGS.get(_first_word(reason))
    return f"{reason}: {meaning}" if meaning else ""


def _first_word(reason: str) -> str:
    match = re.match(r"\w+", reason)  # ReqNodeNotAvail,_UnavailableNodes:n1
    return match[0] if match else ""


def _explain_limit(first_word: str) -> str:
    for pattern, meaning in _LIMIT_MEANINGS.items():
        if match := re.fullmatch(pattern, first_word):
            return meaning.format("QOS" if match[1] == "QOS" else "account")
    return ""
