"""Profiles of clusters, read from TOML: options, modules, launcher, variables.

A profile becomes shell text in two forms. A job rendered for a site contains it in its script. As
`site.env` it also exports options of sbatch as variables, since sbatch reads options before any
shell runs:

    . slurm/site.env && sbatch slurm/multi_node.sbatch
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from typing import Annotated, Literal

from pydantic import Field

from hpctrain.cluster.slurm.sbatch import (
    OPTION_VARIABLES,
    must_be_plain_value,
    must_not_be_reserved,
)
from hpctrain.core import config, files
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NODE_KINDS = ("cpu", "gpu")
LAUNCHERS = {"slurm": "srun --kill-on-bad-exit=1", "pbs": "mpiexec", "flux": "flux run"}


@config.options
class Nodes:
    """A kind of node of a cluster, and the resources of each rank on it."""

    gpus: Annotated[int, Field(ge=0)] = 0  #: per node
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"  #: sbatch's option for GPUs
    tasks_per_node: Annotated[int, Field(ge=1)] = 1  #: of jobs without GPUs
    cpus_per_task: Annotated[int, Field(ge=1)] = 1
    options: dict[str, str] = Field(default_factory=dict)  #: of jobs
    modules: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)

    @property
    def cores(self) -> int:
        """The cores of a node that the profile accounts for."""
        return self.cpus_per_task * (self.gpus or self.tasks_per_node)


@config.options
class Site:
    """A cluster; `cpu` and `gpu` are its nodes without GPUs and with GPUs for hpctrain."""

    title: str
    scheduler: Literal["slurm", "pbs", "flux"] = "slurm"
    cpu: Nodes | None = None
    gpu: Nodes | None = None
    read: list[str] = Field(default_factory=list)  #: the documents from which the profile was made
    notes: list[str] = Field(default_factory=list)  #: advice for users of the cluster
    options: dict[str, str] = Field(default_factory=dict)  #: of jobs, for all kinds of nodes
    plugins: list[str] = Field(default_factory=list)  #: options that the site has added to sbatch
    modules: list[str] = Field(default_factory=list)
    venv: str | None = None  #: the folder of a Python environment that jobs activate
    launcher: str | None = None  #: the scheduler's, in `LAUNCHERS`, if None
    environment: dict[str, str] = Field(default_factory=dict)

    @property
    def start_command(self) -> str:
        """The words that start ranks."""
        return self.launcher or LAUNCHERS[self.scheduler]

    def node_kind(self, gpus: int) -> Nodes:
        """Return the kind of node for a job with `gpus` GPUs per node.

        Raises UsageError if the cluster has no such nodes.
        """
        nodes = self.gpu if gpus else self.cpu
        if nodes is not None and gpus <= nodes.gpus:
            return nodes
        max_gpus = self.gpu.gpus if self.gpu else 0
        if not gpus:
            raise UsageError(
                f"--gpus-per-node is missing: {self.title} only has nodes with {max_gpus} GPUs; "
                f"add --gpus-per-node {max_gpus}, or fewer: each rank takes one"
            )
        availability = f"has nodes with {max_gpus} GPUs" if max_gpus else "has no GPUs for hpctrain"
        advice = f"ask for {max_gpus} at most" if max_gpus else "leave it out"
        raise UsageError(f"--gpus-per-node {gpus}: {self.title} {availability}; {advice}")

    def job_options(self, nodes: Nodes) -> dict[str, str]:
        """Return the options of the submit command for `nodes`."""
        return {**self.options, **nodes.options}

    def setup_script(self, nodes: Nodes, exit_command: str = "exit 1") -> str:
        """Return shell text that prepares a shell for starting ranks on `nodes`.

        It runs `exit_command` if modules or the venv are missing, since ranks would load another
        MPI.
        """
        exports = {"HPCTRAIN_LAUNCHER": self.start_command, **self.environment, **nodes.environment}
        modules = [*self.modules, *nodes.modules]
        lines = [f"module load {shlex.join(modules)} || {exit_command}"] if modules else []
        lines += [f". {shlex.quote(self.venv)}/bin/activate || {exit_command}"] if self.venv else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        origin = "Read from public documentation, not run there:" if self.read else ""
        comments = filter(None, (self.title, origin, *self.read, *self.notes))
        return "\n".join([*(f"# {line}" for line in comments), *lines])

    def site_env(self, nodes: Nodes) -> str:
        """Return the text of site.env: the setup script, then options of sbatch as variables."""
        site_options = self.job_options(nodes)
        gpu_request = gpu_options(nodes.gpus, nodes)
        options = {**site_options, **merge_gpu_options(gpu_request, site_options)}
        exports = [
            f"export {OPTION_VARIABLES[option]}={shlex.quote(value)}"
            for option, value in options.items()
        ]
        # sbatch reads no variables for the numbers of ranks and cores.
        ranks = f"--ntasks-per-node={nodes.gpus or nodes.tasks_per_node}"
        hint = f"#   sbatch {ranks} --cpus-per-task={nodes.cpus_per_task} slurm/multi_node.sbatch"
        comment = "# Options of sbatch as variables; give the others on its command line:"
        return "\n".join([self.setup_script(nodes, "return 1"), comment, hint, *exports, ""])


def must_have_scheduler(site: Site | None, scheduler: str) -> None:
    """Raise UsageError unless jobs of `scheduler` run at the site."""
    if site and site.scheduler != scheduler:
        raise UsageError(
            f"--site: {site.title} has another scheduler: use `hpctrain {site.scheduler}`, or "
            f"a profile with scheduler = '{scheduler}'"
        )


#: Nodes of an unknown kind.
UNKNOWN_NODES = Nodes(gpus=1 << 10)


def gpu_options(gpus: int, nodes: Nodes) -> dict[str, str]:
    """Return the options of sbatch for `gpus` GPUs per node, all of them visible to each task.

    `gpu-bind=none` is not used: it makes Slurm 22.05 leave CUDA_VISIBLE_DEVICES unset. On a site
    where that variable alone separates jobs, ranks would use GPUs of other jobs.
    """
    if not gpus:
        return {}
    return {"gres": f"gpu:{gpus}"} if nodes.gpus_as == "gres" else {"gpus-per-node": str(gpus)}


def merge_gpu_options(gpus: dict[str, str], options: dict[str, str]) -> dict[str, str]:
    """Return the GPU options merged with `options`; their two lists of --gres are joined."""
    gres_lists = [table["gres"] for table in (gpus, options) if "gres" in table]
    return {**gpus, **options, **({"gres": ",".join(gres_lists)} if gres_lists else {})}


def profile_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    files = resources.files("hpctrain.cluster.slurm").joinpath("sites").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_site(name: str) -> Site:
    """Return the profile `name`, a built-in one or a TOML file.

    An unknown name or key raises a UsageError that suggests the nearest known one.
    """
    source = f"site {name}"
    table = toml.parse(_read_profile(name), source)
    toml.must_be_plain(table, source)
    kinds = {
        kind: config.read(Nodes, table.pop(kind), f"{source}.{kind}")
        for kind in NODE_KINDS
        if kind in table
    }
    site = config.read(Site, table | kinds, source)
    _check_site(site, source)
    return site


def _read_profile(name: str) -> str:
    if name.endswith(".toml") or "/" in name:
        return files.read_text(name, toml.LIMIT_BYTES, NAMED)
    if name not in profile_names():
        raise UsageError(config.unknown("site", name, profile_names()) + " (or name a .toml file)")
    return resources.files("hpctrain.cluster.slurm").joinpath("sites", f"{name}.toml").read_text()


def _check_site(site: Site, source: str) -> None:
    """Raise UsageError for text that sbatch or a shell would not read as one plain word."""
    nodes = [kind for kind in (site.cpu, site.gpu) if kind]
    if not nodes:
        raise UsageError(
            f"[{source}] expected a table [cpu] or [gpu]: its nodes without and with GPUs"
        )
    tables: list[Site | Nodes] = [site, *nodes]
    for table in tables:
        for key, value in table.options.items() if site.scheduler == "slurm" else ():
            config.pick(OPTION_VARIABLES, key, f"option of sbatch in {source}:")
            must_not_be_reserved(f"[{source}] {key}", key, value)
            must_be_plain_value(f"[{source}] {key}", value)
        for variable in table.environment:
            if not _VARIABLE_NAME.fullmatch(variable):
                raise UsageError(f"[{source}] environment: '{variable}' is not a variable name")
    texts = [site.title, site.start_command, site.venv or "", *site.read, *site.notes]
    texts += [word for table in tables for word in (*table.modules, *table.environment.values())]
    for text in texts:
        if not text.isprintable():
            raise UsageError(
                f"[{source}] expected text without control characters, seen {files.brief(text)}"
            )
