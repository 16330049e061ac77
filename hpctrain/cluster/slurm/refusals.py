"""Explain sbatch's refusal of a script: its error text, and the script lines that may be wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Words in sbatch's error texts, and the options to which they refer
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
# Options that may describe a node that does not exist: "Requested node configuration ..."
_NODE_OPTIONS = ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "gres", "mem",
             "constraint", "nodelist", "exclude")  # fmt: skip


def explain_refusal(reply: str, script: str) -> str:
    """Return sbatch's `reply`, and the lines of the script to which it may refer."""
    lines: list[str] = []
    for rule in (  # the most reliable first
        lambda option, _, reply: re.search(rf"--{option}(?![a-z-])", reply),
        _is_option_mentioned,
        lambda option, _, reply: "node configuration" in reply and option in _NODE_OPTIONS,
    ):
        options = _parse_options(script)
        lines = lines or [line for line, name, value in options if rule(name, value, reply.lower())]
    headline = f"sbatch refuses the job:\n{reply.strip()}"
    return "\n".join([headline, *(["these lines may be the cause:"] if lines else []), *lines])


def _parse_options(script: str) -> Iterator[tuple[str, str, str]]:
    """Yield a description of each #SBATCH line, its option and its value."""
    for line_number, line in enumerate(script.splitlines(), start=1):
        if match := re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?", line):
            yield f"  line {line_number}: {line}", match[1], match[2] or ""


def _is_option_mentioned(option: str, value: str, reply: str) -> bool:
    value_matches = len(value) > 3 and value.lower() in reply
    words_match = any(
        words in reply and option in options for words, options in _OPTIONS_BY_WORDS.items()
    )
    return value_matches or words_match or option in re.findall("[a-z][a-z-]*", reply)
