"""The options that sbatch knows, and the values allowed on an #SBATCH line.

sbatch reads such lines by rules of its own, before any shell does: blanks divide, quotes and
backslashes bind, `#` ends a line. A value without all of these is read as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpctrain import config
from hpctrain.core.errors import UsageError

# Long options of Slurm 22.05 to 25.05 that take a value, or none, and suit a script.
_OPTIONS = """
account acctg-freq bb bbf batch begin cluster-constraint comment constraint
consolidate-segments container container-id contiguous core-spec cores-per-socket cpu-freq
cpus-per-gpu deadline delay-boot dependency distribution error exclude exclusive export export-file
extra extra-node-info get-user-env gid gpu-bind gpu-freq gres gres-flags hint hold ignore-pbs input
kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
mincpus network nice no-kill nodefile nodelist ntasks-per-core ntasks-per-socket oom-kill-step
output overcommit oversubscribe partition power prefer priority profile propagate qos reboot
reservation resv-ports segment sockets-per-node spread-job spread-segments stepmgr switches
thread-spec threads-per-core time-min tmp uid use-min-nodes wait-all-nodes wckey
"""

#: Options that a script must not have, and why.
RESERVED = {
    "array": "name the sizes: --sizes 1,2,4",
    "clusters": "export SLURM_CLUSTERS=NAME, which scontrol reads as well",
    "chdir": "a job runs in the folder in which it was submitted",
    "cpus-per-task": "use --cpus-per-task",
    "gpus": "use --gpus-per-node",
    "gpus-per-node": "use --gpus-per-node",
    "gpus-per-socket": "use --gpus-per-node",
    "gpus-per-task": "it hides the neighbours' GPUs from a rank; use --gpus-per-node",
    "job-name": "use --job-name",
    "no-requeue": "use --max-restarts 0",
    "nodes": "use --nodes",
    "ntasks": "use --ranks",
    "ntasks-per-gpu": "use --tasks-per-node",
    "ntasks-per-node": "use --tasks-per-node",
    "open-mode": "the output of a job that comes back is always appended",
    "requeue": "use --max-restarts",
    "signal": "use --warn-s",
    "time": "use --time",
    "tres-bind": "it hides the neighbours' GPUs from a rank; use --gpus-per-node",
    "tres-per-task": "of GPUs it hides the neighbours'; use --gpus-per-node and --cpus-per-task",
    **dict.fromkeys(
        ("help", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait", "wrap"),
        "it is no property of a job; call sbatch yourself with what `hpctrain slurm render` prints",
    ),
}

#: What salloc, of a shell, does not take.
NOT_OF_SALLOC = frozenset(
    ("error", "export", "export-file", "ignore-pbs", "input", "output", "propagate")
)
#: All that may be named.
ALL_OPTIONS = dict.fromkeys([*_OPTIONS.split(), *RESERVED])


def _variable(option: str) -> str:
    return f"SBATCH_{option.upper().replace('-', '_')}"


#: Options that sbatch also reads from the environment.
VARIABLES = {
    **{
        name: _variable(name)
        for name in (
            "account", "clusters", "constraint", "cpus-per-gpu", "exclusive", "gpu-bind",
            "gpus-per-node", "gres", "gres-flags", "hint", "network", "partition", "qos",
            "reservation", "threads-per-core",
        )
    },
    "array": "SBATCH_ARRAY_INX",
    "mem": "SBATCH_MEM_PER_NODE",
    "time": "SBATCH_TIMELIMIT",
}  # fmt: skip

_MARKS = "_.,:;=@%+/~^*!&|()[]<>?{}-"
_PLAIN = re.compile(rf"[A-Za-z0-9{re.escape(_MARKS)}]*")
_GPUS = re.compile(r"(^|,)(gres[:/])?gpu\b")


def parse_option(text: str) -> tuple[str, str]:
    """Return the name and the value of NAME=VALUE; of a flag, a NAME alone, no value.

    Raises UsageError for a value that is empty: left out, the option would mean something else.
    """
    name, sign, value = text.lstrip("-").partition("=")
    if sign and not value:
        raise UsageError(f"--option {text}: expected a value behind the =, or a flag without one")
    return name, value


def check(options: Mapping[str, str], plugins: Sequence[str] = ()) -> None:
    """Raise UsageError for an option that sbatch does not know, or that a job has already.

    `plugins` are options that a site has added to its sbatch.
    """
    for name, value in options.items():
        config.pick({**ALL_OPTIONS, **dict.fromkeys(plugins)}, name, "option of sbatch")
        must_be_free(f"sbatch's --{name}", name, value)
        must_be_plain(f"--option {name}", value)


def must_be_free(label: str, name: str, value: str) -> None:
    """Raise UsageError for an option that a job has already, or that hides GPUs from its ranks."""
    if name in RESERVED:
        raise UsageError(f"{label} cannot be set: {RESERVED[name]}")
    if name == "gres" and _GPUS.search(value):
        raise UsageError(f"{label} cannot ask for GPUs: use --gpus-per-node; seen {value!r}")
    if name == "gpu-bind" and value != "none":
        raise UsageError(
            f"{label}: ranks of a node must see each other's GPUs; where the site binds tasks to "
            f"GPUs, 'none' undoes that, else leave it out; seen {value!r}"
        )


def must_be_plain(label: str, value: str) -> None:
    """Raise UsageError unless sbatch reads `value` as one word, and a shell would not run it."""
    if not _PLAIN.fullmatch(value):
        raise UsageError(
            f"{label}: expected letters (ASCII), digits and {_MARKS} alone, since sbatch reads it "
            f"from a line of the script; seen {value!r}"
        )


def variables(options: Iterable[str]) -> set[str]:
    """Return the environment variables that would override `options` in sbatch."""
    names = set(options)
    if names & {"requeue", "no-requeue"}:
        names |= {"requeue", "no-requeue"}
    return {VARIABLES.get(name, _variable(name)) for name in names}


def lines(options: Mapping[str, str]) -> str:
    """Return an #SBATCH line for each option; an empty value makes a flag."""
    return "\n".join(f"#SBATCH {word}" for word in words(options))


def words(options: Mapping[str, str]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
