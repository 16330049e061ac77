"""Explain sbatch's refusal of a script: its error text, and the lines that it may be about."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Words of sbatch's error texts, and the options that they stand for
_OPTIONS_BY_WORDS = {
    "account": ("account",),
    "constraint": ("constraint",),
    "cpu count": ("ntasks-per-node", "cpus-per-task"),
    "feature": ("constraint",),
    "generic resource": ("gres",),
    "gres": ("gpus-per-node",),
    "license": ("licenses",),
    "memory": ("mem", "mem-per-cpu", "mem-per-gpu"),
    "node count": ("nodes",),
    "node name": ("nodelist", "exclude"),
    "partition": ("partition",),
    "processors requested": ("nodes", "ntasks-per-node", "cpus-per-task"),
    "qos": ("qos",),
    "reservation": ("reservation",),
    "time limit": ("time",),
}
# Options that may ask for a node that does not exist: "Requested node configuration ..."
_OF_NODES = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres", "mem",
             "constraint", "nodelist", "exclude")  # fmt: skip


def refusal(reply: str, text: str) -> str:
    """Return sbatch's `reply`, and the lines of the script `text` that it may be about."""
    lines: list[str] = []
    for rule in (_is_quoted, _is_mentioned, _is_of_nodes):  # the surest first
        options = _options(text)
        lines = lines or [line for line, name, value in options if rule(name, value, reply.lower())]
    head = f"sbatch refuses the job:\n{reply.strip()}"
    return "\n".join([head, *(["that may be about"] if lines else []), *lines])


def _options(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield of each #SBATCH line its text for the message, its option and the value."""
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?", line):
            yield f"  line {number}: {line}", match[1], match[2] or ""


def _is_quoted(option: str, value: str, reply: str) -> bool:
    return re.search(rf"--{option}(?![a-z-])", reply) is not None


def _is_mentioned(option: str, value: str, reply: str) -> bool:
    by_value = len(value) > 3 and value.lower() in reply
    by_words = any(
        words in reply and option in options for words, options in _OPTIONS_BY_WORDS.items()
    )
    return by_value or by_words or option in re.findall("[a-z][a-z-]*", reply)


def _is_of_nodes(option: str, value: str, reply: str) -> bool:
    return "node configuration" in reply and option in _OF_NODES
