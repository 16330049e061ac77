"""A scheduler whose jobs submit their successors themselves: its words, and the script of a job.

    Job (recipe, resources)  +  Dialect (words of PBS or of Flux)  ->  text

The text comes from job.sh. Values of options become directives, which the submit command reads by
its own rules, so they hold plain characters alone.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from hpctrain.cluster.slurm.job import (
    Job,
    job_name,
    must_have_no_faults,
    node_kind,
    rank_words,
    resource_faults,
    tasks_per_node,
)
from hpctrain.cluster.slurm.queries import JobId, JobState
from hpctrain.cluster.slurm.render import ABOUT, cores_per_task, fill_template
from hpctrain.cluster.slurm.sbatch import must_be_plain_value
from hpctrain.cluster.slurm.site import Site, must_have_scheduler
from hpctrain.core import config
from hpctrain.core.errors import UsageError

UNTRIED = "not run on a real one"  #: what help, scripts and documentation say of a dialect
_AMONG_RANKS = "the last ranks of a job serve: --set engine.kind=ps-sync --set engine.servers=N"
_NODES_ARE_FIXED = "after a loss the job starts again on its nodes, or is submitted again"
#: Fields of a job that Slurm alone can have, and what to do instead.
REFUSED_FIELDS = {
    "servers": _AMONG_RANKS,
    "server_nodes": _AMONG_RANKS,
    "sizes": "a task of an array cannot submit itself again; submit a job for each number of nodes",
    "min_ranks": _NODES_ARE_FIXED,
    "elastic": _NODES_ARE_FIXED,
    "spares": _NODES_ARE_FIXED,
}


@dataclass(frozen=True)
class Dialect:
    """The words of a scheduler, as its documentation has them."""

    name: str  #: of the command of hpctrain, and of the folder of site.env
    title: str
    submit: tuple[str, ...]  #: the command that reads a script from stdin
    cancel: tuple[str, ...]
    sentinel: str  #: what a directive begins with
    id_variable: str  #: the environment variable of a job's id
    folder_line: str  #: the line of the script that enters the folder of submission; may be empty
    shell: str  #: the command that opens a shell in an allocation
    has_environment: bool  #: whether a job gets the environment of its submission
    #: Options for --option, and their directives; {} stands for the value.
    options: Mapping[str, str]
    #: Of these the options that `directives` reads itself.
    resources: tuple[str, ...]
    reserved: Mapping[str, str]  #: options that a script sets itself, and the reasons
    bad_in_folder: str  #: characters that may not be in the path of a job's output
    directives: Callable[[Job], list[str]]
    #: Returns the options that bring a job's output into a folder.
    output_options: Callable[[Path], list[str]]
    log_pattern: Callable[[str], str]  #: returns the pattern of the file of a job's output
    parse_id: Callable[[str], str]  #: returns the id in the submit command's reply; empty if none
    query: Callable[[JobId], list[JobState]]

    @property
    def script_file(self) -> str:
        """The script of the latest job, in the folder of its run."""
        return f"job.{self.name}"

    def check(self, job: Job, site: Site | None = None) -> None:
        """Raise a UsageError that lists all faults of an impossible job."""
        refusals = [
            f"--{field.replace('_', '-')}: {self.title} has no such jobs here; {advice}"
            for field, advice in REFUSED_FIELDS.items()
            if getattr(job, field) != getattr(Job(), field)
        ]
        if job.interactive:
            refusals.append(f"--interactive: asks salloc for nodes; here call `{self.shell}`")
        must_have_scheduler(site, self.name)
        must_have_no_faults([*refusals, *resource_faults(job, site)])
        for name, value in _add_site(job, site).options.items():
            self._check_option(name, value)

    def _check_option(self, name: str, value: str) -> None:
        command = " ".join(self.submit)
        config.pick({**self.options, **self.reserved}, name, f"option of {command}")
        if name in self.reserved:
            raise UsageError(f"--option {name}: cannot be set: {self.reserved[name]}")
        if ("{}" in self.options[name]) != bool(value):
            form = "=VALUE" if not value else ", without a value"
            raise UsageError(f"--option {name}: expected {name}{form}, seen {value!r}")
        must_be_plain_value(f"--option {name}", value, command)
        if self.options[name].startswith(("-l", "-W")):  # lists of NAME=VALUE
            own = {name: f"use --option {name}=..., or --nodes" for name in self.resources}
            for key, advice in {**own, **self.reserved}.items():
                if f",{key}=" in f",{value}":
                    raise UsageError(f"--option {name}={value}: cannot set {key}: {advice}")

    def render(self, job: Job, site: Site | None = None, folder: Path | None = None) -> str:
        """Return the script of `job`; `folder` is its run's if it is submitted at once."""
        self.check(job, site)
        job = _add_site(job, site)
        directives = self.directives(job)
        for name, value in job.options.items():
            directives += [self.options[name].format(value)] * (name not in self.resources)
        numbers = {
            "ranks-per-node": job.tasks_per_node or job.gpus_per_node or 1,
            "cores": job.cpus_per_task or 1,
            "gpus": job.gpus_per_node,
            "time-s": job.limit_s,
            "warn-s": job.warn_s,
            "max-restarts": job.max_restarts,
            "relaunches": job.relaunches,
            **({"program": 1} if job.program else {}),
        }
        text = resources.files("hpctrain.cluster.schedulers").joinpath("job.sh").read_text()
        name = job_name(job)
        return fill_template(
            text,
            {
                "title": f"{self.title} ({UNTRIED})",
                "submit": shlex.join(self.submit),
                "directives": "\n".join(f"{self.sentinel} {words}" for words in directives),
                "folder": self.folder_line,
                "site": site.setup_script(node_kind(job, site))
                if site
                else fill_template(_SITE_FILE, {"site": f"{self.name}/site.env"}),
                "path": _path_line() if folder and not self.has_environment else "",
                "run": shlex.quote(job.out) if job.out else f"runs/{name}-${self.id_variable}",
                "about": ABOUT[bool(job.program)],
                "train": shlex.join(rank_words(job)),
                "in_job": f"--in-{self.name}",
                "nodes": str(job.nodes),
                "numbers": _fold([f"--{name}={value}" for name, value in numbers.items()]),
            },
        )


_SITE_FILE = """\
# The site: modules, Python, launcher, network.
if [ -f {{ site }} ] && ! . {{ site }}; then
    echo "{{ site }}: its last command failed; where that is no fault, let it end with 'true'" >&2
    exit 1
fi"""


def _add_site(job: Job, site: Site | None) -> Job:
    """Return `job` with the ranks, cores and options of the site's nodes where it has none."""
    if site is None:
        return job
    return replace(
        job,
        tasks_per_node=tasks_per_node(job, site),
        cpus_per_task=cores_per_task(job, site),
        options={**site.job_options(node_kind(job, site)), **job.options},
    )


def _fold(words: list[str]) -> str:
    """Return words in two lines of a shell command."""
    half = len(words) // 2
    return " \\\n    ".join(" ".join(part) for part in (words[:half], words[half:]))


def _path_line() -> str:
    """Return the line that lets a job find the `hpctrain` that submits it, if it has none."""
    folder = shlex.quote(str(Path(sys.executable).parent))
    return f"PATH=$PATH:{folder} # of the hpctrain that submitted this job"
