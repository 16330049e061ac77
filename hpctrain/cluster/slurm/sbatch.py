"""The options that sbatch knows, and the values allowed on an #SBATCH line.

sbatch parses such lines by its own rules, before any shell does: blanks separate words, quotes and
backslashes protect blanks, `#` ends a line. A value without these characters is taken literally.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpctrain.core import config
from hpctrain.core.errors import UsageError

# Long options of Slurm 22.05 to 25.05 that a script may set, with or without a value.
_OPTION_NAMES = """
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

#: Options that a script must not set, and the reasons.
RESERVED_OPTIONS = {
    "array": "name the sizes: --sizes 1,2,4",
    "clusters": "export SLURM_CLUSTERS=NAME, which scontrol reads as well",
    "chdir": "a job runs in the folder from which it was submitted",
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
    "open-mode": "the output of a requeued job is always appended",
    "requeue": "use --max-restarts",
    "signal": "use --warn-s",
    "time": "use --time",
    "tres-bind": "it hides the neighbours' GPUs from a rank; use --gpus-per-node",
    "tres-per-task": "it hides neighbours' GPUs; use --gpus-per-node and --cpus-per-task",
    **dict.fromkeys(
        ("help", "parsable", "quiet", "test-only", "usage", "verbose", "version", "wait", "wrap"),
        "it is no property of a job; call sbatch with the output of `hpctrain slurm render`",
    ),
}

#: Options of sbatch that salloc does not accept.
SBATCH_ONLY_OPTIONS = frozenset(
    ("error", "export", "export-file", "ignore-pbs", "input", "output", "propagate")
)
#: All known names of options.
ALL_OPTIONS = dict.fromkeys([*_OPTION_NAMES.split(), *RESERVED_OPTIONS])


def _variable_name(option: str) -> str:
    return f"SBATCH_{option.upper().replace('-', '_')}"


#: Options that sbatch also reads from the environment.
OPTION_VARIABLES = {
    **{
        name: _variable_name(name)
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

_PUNCTUATION = "_.,:;=@%+/~^*!&|()[]<>?{}-"
_PLAIN_VALUE = re.compile(rf"[A-Za-z0-9{re.escape(_PUNCTUATION)}]*")
_GPU_REQUEST = re.compile(r"(^|,)(gres[:/])?gpu\b")


def parse_option(text: str) -> tuple[str, str]:
    """Return the name and value of an option NAME=VALUE; the value of a flag, NAME, is empty.

    Raises UsageError for NAME= without a value: as a flag the option would mean something else.
    """
    name, separator, value = text.lstrip("-").partition("=")
    if separator and not value:
        raise UsageError(f"--option {text}: expected a value behind the =, or a flag without =")
    return name, value


def check_options(options: Mapping[str, str], plugins: Sequence[str] = ()) -> None:
    """Raise UsageError for options that sbatch does not know or that hpctrain sets itself.

    `plugins` are options that a site has added to its sbatch.
    """
    for name, value in options.items():
        config.pick({**ALL_OPTIONS, **dict.fromkeys(plugins)}, name, "option of sbatch")
        must_not_be_reserved(f"sbatch's --{name}", name, value)
        must_be_plain_value(f"--option {name}", value)


def must_not_be_reserved(label: str, name: str, value: str) -> None:
    """Raise UsageError for an option that hpctrain sets itself, or that hides GPUs from ranks."""
    if name in RESERVED_OPTIONS:
        raise UsageError(f"{label} cannot be set: {RESERVED_OPTIONS[name]}")
    if name == "gres" and _GPU_REQUEST.search(value):
        raise UsageError(f"{label} cannot ask for GPUs: use --gpus-per-node; seen {value!r}")
    if name == "gpu-bind" and value != "none":
        raise UsageError(
            f"{label}: ranks of a node must see each other's GPUs; if the site binds tasks to "
            f"GPUs, use 'none', otherwise leave the option out; seen {value!r}"
        )


def must_be_plain_value(label: str, value: str, command: str = "sbatch") -> None:
    """Raise UsageError unless `command` reads `value` as one word without special characters."""
    if not _PLAIN_VALUE.fullmatch(value):
        raise UsageError(
            f"{label}: expected only ASCII letters, digits and {_PUNCTUATION}, since {command} "
            f"reads the value from a line of the script; seen {value!r}"
        )


def overriding_variables(options: Iterable[str]) -> set[str]:
    """Return the environment variables that would override `options` in sbatch."""
    option_names = set(options)
    if option_names & {"requeue", "no-requeue"}:
        option_names |= {"requeue", "no-requeue"}
    return {OPTION_VARIABLES.get(name, _variable_name(name)) for name in option_names}


def sbatch_lines(options: Mapping[str, str]) -> str:
    """Return an #SBATCH line per option; an option with an empty value is a flag."""
    return "\n".join(f"#SBATCH {word}" for word in option_words(options))


def option_words(options: Mapping[str, str]) -> list[str]:
    """Return the options as words of a command line."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]
