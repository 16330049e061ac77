"""Slurm's reasons why a job does not start or has ended, and their meanings."""

from __future__ import annotations

import re

_RELEASE = "scontrol release it"
_MEANINGS = {
    "AccountNotAllowed": "the partition is not for this account: name another",
    "BadConstraints": "no node has what the job asks for",
    "BeginTime": "not before its time",
    "BurstBufferOperation": "its burst buffer could not be made ready",
    "BurstBufferResources": "waits for a burst buffer",
    "BurstBufferStageIn": "its burst buffer is made ready",
    "Cleaning": "what it has left on its nodes is removed first",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job that had to end well did not: scancel this one",
    "InvalidAccount": "the account is none of yours here: scancel it, and name another",
    "InvalidQOS": "there is no such QOS for it: scancel it, and name another",
    "JobArrayTaskLimit": "the sizes of an array run one after the other",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": f"held: {_RELEASE}",
    "JobHoldMaxRequeue": f"put back so often that Slurm holds it: {_RELEASE}",
    "Licenses": "waits for a license",
    "MaxMemPerLimit": "more memory for a node or a core than is given: ask for less",
    "Nodes_required_for_job_are_DOWN": "so many nodes are not up, or kept for others",
    "PartitionConfig": "the partition cannot give that: ask for less, or name another",
    "PartitionDown": "the partition starts no jobs now",
    "PartitionInactive": "the partition takes and starts no jobs now",
    "PartitionNodeLimit": "the partition has not, or does not give, so many nodes",
    "PartitionTimeLimit": "the partition does not give so much time",
    "Priority": "other jobs come first",
    "Prolog": "the site prepares its nodes",
    "QOSNotAllowed": "the account or the partition has not this QOS: name another",
    "QOSUsageThreshold": "the account has had more than its share, and this QOS wants less",
    "ReqNodeNotAvail": "nodes are down, drained or reserved",
    "Reservation": "not before its reservation begins",
    "ReservationDeleted": "there is no such reservation any more: scancel it",
    "Resources": "waits for nodes to become free",
    "SchedDefer": "Slurm has not looked at it yet",
    "WaitingForScheduling": "Slurm has not looked at it yet",
    "job_requeued_in_held_state": f"held: {_RELEASE}",
    "launch_failed_requeued_held": f"its nodes could not start it, and Slurm holds it: {_RELEASE}",
}
#: Reasons why a job has ended; then the reasons for waiting do not hold any more.
_ENDS = {
    "DeadLine": "it could not end before its deadline",
    "DependencyNeverSatisfied": "the job that had to end well did not",
    "InactiveLimit": "it has done nothing for too long",
    "JobLaunchFailure": "its nodes could not start it: a file system, or the nodes themselves",
    "NodeDown": "a node of it is down",
    "NonZeroExitCode": "its script ended with an error",
    "OutOfMemory": "a node of it had too little memory",
    "RaisedSignal": "its script was ended by a signal",
    "SystemFailure": "Slurm, a file system or the network has failed",
    "TimeLimit": "its time was over",
}
#: The same for the many limits of a QOS and of an account; the first match counts.
_LIMITS = {
    r"(QOS|Assoc)Grp\w*(?<!Run)Minutes\w*": "the {} has used up its time",
    r"(QOS|Assoc)\w*PerJob\w*": "more than the {} gives one job: ask for less",
    r"(QOS|Assoc)Min(?!utes)\w*": "less than the {} takes of a job: ask for more",
    r"(QOS|Assoc)\w*": "a limit of the {} on all jobs together: others end first, or ask for less",
}

#: Reasons that do not pass by waiting: somebody has to change the job, or the cluster.
_PERMANENT = {"BadConstraints", "DependencyNeverSatisfied", "PartitionNodeLimit",
            "PartitionTimeLimit", "QOSNotAllowed"}  # fmt: skip


def is_permanent(reason: str) -> bool:
    """Return whether a job that has this reason will not start by waiting."""
    word = _word(reason)
    return word in _PERMANENT or re.fullmatch(r"(QOS|Assoc)\w*PerJob\w*", word) is not None


def explain(reason: str, restarts: int | None = None) -> str:
    """Return Slurm's reason, followed by its meaning if that is known.

    `restarts` is the number of requeues, after which BeginTime has another meaning.
    """
    word = _word(reason)
    meaning = _MEANINGS.get(word) or _ENDS.get(word) or _limit(word)
    if word == "BeginTime" and restarts:
        meaning = "after a requeue Slurm lets two minutes pass"
    return f"{reason}: {meaning}" if meaning else reason


def explain_end(reason: str) -> str:
    """Return the same for an ended job; "" if the reason is one for waiting."""
    meaning = _ENDS.get(_word(reason))
    return f"{reason}: {meaning}" if meaning else ""


def _word(reason: str) -> str:
    match = re.match(r"\w+", reason)  # ReqNodeNotAvail,_UnavailableNodes:n1
    return match[0] if match else ""


def _limit(word: str) -> str:
    for pattern, meaning in _LIMITS.items():
        if match := re.fullmatch(pattern, word):
            return meaning.format("QOS" if match[1] == "QOS" else "account")
    return ""
