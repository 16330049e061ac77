"""What sbatch says of a script that it refuses, and the lines of the script this may be about."""

from __future__ import annotations

import re
from collections.abc import Iterator

# In what sbatch says, words that stand for options
_MEANT = {
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
# Each of them may ask for a node that there is not: "Requested node configuration ..."
_OF_NODES = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres", "mem",
             "constraint", "nodelist", "exclude")  # fmt: skip


def refusal(said: str, text: str) -> str:
    """Return sbatch's words, and the lines of the script `text` that they may be about."""
    lines: list[str] = []
    for rule in (_is_named, _is_told_of, _is_of_nodes):  # the surest first
        told = _options(text)
        lines = lines or [line for line, name, value in told if rule(name, value, said.lower())]
    head = f"sbatch refuses the job:\n{said.strip()}"
    return "\n".join([head, *(["that may be about"] if lines else []), *lines])


def _options(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield how each #SBATCH line is shown, its option and the value."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?", line):
            yield f"  line {number}: {line}", found[1], found[2] or ""


def _is_named(option: str, value: str, said: str) -> bool:
    return re.search(rf"--{option}(?![a-z-])", said) is not None


def _is_told_of(option: str, value: str, said: str) -> bool:
    by_value = len(value) > 3 and value.lower() in said
    by_words = any(words in said and option in meant for words, meant in _MEANT.items())
    return by_value or by_words or option in re.findall("[a-z][a-z-]*", said)


def _is_of_nodes(option: str, value: str, said: str) -> bool:
    return "node configuration" in said and option in _OF_NODES
