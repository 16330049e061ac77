"""Reasons why a job does not start, as Slurm words them, and what they mean."""

from __future__ import annotations

import re

_MEANT = {
    "BadConstraints": "no node has what the job asks for",
    "BeginTime": "not before its time; after a requeue Slurm lets two minutes pass",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job that had to end well did not: scancel this one",
    "InvalidAccount": "the account is none of yours here: scancel it, and name another",
    "InvalidQOS": "there is no such QOS for it: scancel it, and name another",
    "JobArrayTaskLimit": "the sizes of an array run one after the other",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held: scontrol release it",
    "JobHoldMaxRequeue": "put back so often that Slurm holds it: scontrol release it",
    "Nodes_required_for_job_are_DOWN": "so many nodes are not up, or kept for others",
    "PartitionConfig": "the partition cannot give that: ask for less, or name another",
    "PartitionDown": "the partition starts no jobs now",
    "PartitionInactive": "the partition takes and starts no jobs now",
    "PartitionNodeLimit": "the partition has not, or does not give, so many nodes",
    "PartitionTimeLimit": "the partition does not give so much time",
    "Priority": "other jobs come first",
    "QOSNotAllowed": "the account or the partition has not this QOS: name another",
    "ReqNodeNotAvail": "nodes are down, drained or reserved",
    "Resources": "waits for nodes to become free",
}
#: The same for the many limits of a QOS and of an account; the first that fits tells.
_LIMITS = {
    r"(QOS|Assoc)Grp\w*(?<!Run)Minutes\w*": "the {} has used up its time",
    r"(QOS|Assoc)\w*PerJob\w*": "more than the {} gives one job: ask for less",
    r"(QOS|Assoc)Min(?!utes)\w*": "less than the {} takes of a job: ask for more",
    r"(QOS|Assoc)\w*": "a limit of the {} on all jobs together: others end first, or ask for less",
}

#: Reasons that do not pass by waiting: somebody has to change the job, or the cluster.
_LASTING = {"BadConstraints", "DependencyNeverSatisfied", "PartitionNodeLimit",
            "PartitionTimeLimit", "QOSNotAllowed"}  # fmt: skip


def lasting(reason: str) -> bool:
    """Return whether a job that has this reason will not start by waiting."""
    word = _word(reason)
    return word in _LASTING or re.fullmatch(r"(QOS|Assoc)\w*PerJob\w*", word) is not None


def explained(reason: str) -> str:
    """Return Slurm's word, and behind it what it means if that is known."""
    word = _word(reason)
    known = _MEANT.get(word) or _limit(word)
    return f"{reason}: {known}" if known else reason


def _word(reason: str) -> str:
    return reason.rstrip(",").partition(",")[0]


def _limit(word: str) -> str:
    for pattern, meaning in _LIMITS.items():
        if found := re.fullmatch(pattern, word):
            return meaning.format("QOS" if found[1] == "QOS" else "account")
    return ""
