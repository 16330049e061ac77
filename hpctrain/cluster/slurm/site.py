"""Profiles of clusters, read from TOML: options, modules, launcher, variables.

A profile becomes shell text twice. In a job that was rendered for a site it stands in the script;
as `site.env` it also exports the options of sbatch, which are read before any shell runs:

    . slurm/site.env && sbatch slurm/multi_node.sbatch
"""

from __future__ import annotations

import re
import shlex
from importlib import resources
from typing import Annotated, Literal

from pydantic import Field

from hpctrain import config
from hpctrain.cluster.slurm.sbatch import VARIABLES, must_be_free, must_be_plain
from hpctrain.config import toml
from hpctrain.core import files
from hpctrain.core.errors import UsageError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KINDS = ("cpu", "gpu")


@config.options
class Nodes:
    """A kind of node of a cluster, and how ranks use it."""

    gpus: Annotated[int, Field(ge=0)] = 0  #: on each node
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"  #: the option that asks for them
    tasks_per_node: Annotated[int, Field(ge=1)] = 1  #: where a job asks for no GPUs
    cpus_per_task: Annotated[int, Field(ge=1)] = 1
    options: dict[str, str] = Field(default_factory=dict)  #: of sbatch
    modules: list[str] = Field(default_factory=list)
    environment: dict[str, str] = Field(default_factory=dict)

    @property
    def cores(self) -> int:
        """The cores of a node that the profile accounts for."""
        return self.cpus_per_task * (self.gpus or self.tasks_per_node)


@config.options
class Site:
    """A cluster; `cpu` and `gpu` are its nodes without and with GPUs that hpctrain can use."""

    title: str
    cpu: Nodes | None = None
    gpu: Nodes | None = None
    read: list[str] = Field(default_factory=list)  #: the documents this was read from
    notes: list[str] = Field(default_factory=list)  #: what its users should know
    options: dict[str, str] = Field(default_factory=dict)  #: of sbatch, on all nodes
    plugins: list[str] = Field(default_factory=list)  #: options that the site has added to sbatch
    modules: list[str] = Field(default_factory=list)
    venv: str | None = None  #: the folder of a Python environment that jobs activate
    launcher: str = "srun --kill-on-bad-exit=1"
    environment: dict[str, str] = Field(default_factory=dict)

    def nodes(self, gpus: int) -> Nodes:
        """Return the nodes for a job that asks for `gpus` GPUs on each.

        Raises UsageError where there are none such.
        """
        nodes = self.gpu if gpus else self.cpu
        if nodes is not None and gpus <= nodes.gpus:
            return nodes
        limit = self.gpu.gpus if self.gpu else 0
        if not gpus:
            raise UsageError(
                f"--gpus-per-node is missing: {self.title} has nodes with {limit} GPUs alone; add "
                f"--gpus-per-node {limit}, or fewer: each rank takes one"
            )
        text = f"has nodes with {limit} GPUs" if limit else "has no GPUs that hpctrain was tried on"
        advice = f"ask for {limit} at most" if limit else "leave it out"
        raise UsageError(f"--gpus-per-node {gpus}: {self.title} {text}; {advice}")

    def sbatch_options(self, nodes: Nodes) -> dict[str, str]:
        """Return the options of sbatch for `nodes`."""
        return {**self.options, **nodes.options}

    def setup(self, nodes: Nodes, on_failure: str = "exit 1") -> str:
        """Return shell text that makes a shell ready to start ranks on `nodes`.

        If modules or the environment are missing, it runs `on_failure`: another MPI would be used.
        """
        exports = {"HPCTRAIN_LAUNCHER": self.launcher, **self.environment, **nodes.environment}
        modules = [*self.modules, *nodes.modules]
        lines = [f"module load {shlex.join(modules)} || {on_failure}"] if modules else []
        lines += [f". {shlex.quote(self.venv)}/bin/activate || {on_failure}"] if self.venv else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        return "\n".join([*self._comments(), *lines])

    def env(self, nodes: Nodes) -> str:
        """Return the text of a file site.env: options of sbatch as variables, then `setup`."""
        sbatch_options = self.sbatch_options(nodes)
        options = {**sbatch_options, **with_gpus(gpu_options(nodes.gpus, nodes), sbatch_options)}
        exports = [f"export {VARIABLES[k]}={shlex.quote(v)}" for k, v in options.items()]
        # Of ranks and their cores sbatch reads no variables.
        ranks = f"--ntasks-per-node={nodes.gpus or nodes.tasks_per_node}"
        example_line = (
            f"#   sbatch {ranks} --cpus-per-task={nodes.cpus_per_task} slurm/multi_node.sbatch"
        )
        setup, comment = self.setup(nodes, "return 1"), "# Options of sbatch; others go with it:"
        return "\n".join([setup, comment, example_line, *exports, ""])

    def _comments(self) -> list[str]:
        origin = "Read from public documentation, not run there:" if self.read else ""
        return [f"# {line}" for line in (self.title, origin, *self.read, *self.notes) if line]


#: Nodes of an unknown kind.
UNKNOWN_NODES = Nodes(gpus=1 << 10)


def gpu_options(gpus: int, nodes: Nodes) -> dict[str, str]:
    """Return the options of sbatch for `gpus` GPUs on each node, all of them visible to each task.

    Not `gpu-bind=none`: with it Slurm 22.05 shows tasks no GPUs (CUDA_VISIBLE_DEVICES is unset),
    and where nothing but that variable keeps jobs apart, they would take those of others.
    """
    if not gpus:
        return {}
    return {"gres": f"gpu:{gpus}"} if nodes.gpus_as == "gres" else {"gpus-per-node": str(gpus)}


def with_gpus(gpus: dict[str, str], options: dict[str, str]) -> dict[str, str]:
    """Return the options that ask for GPUs and `options`; their two lists of --gres are joined."""
    gres = [part["gres"] for part in (gpus, options) if "gres" in part]
    return {**gpus, **options, **({"gres": ",".join(gres)} if gres else {})}


def names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    files = resources.files("hpctrain.cluster.slurm").joinpath("sites").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load(name: str) -> Site:
    """Return the profile `name`, or the one in file `name`.

    Raises UsageError that names the nearest profile or key.
    """
    source = f"site {name}"
    table = toml.parse(_text(name), source)
    toml.must_be_plain(table, source)
    kinds = {k: config.read(Nodes, table.pop(k), f"{source}.{k}") for k in KINDS if k in table}
    site = config.read(Site, table | kinds, source)
    _check(site, source)
    return site


def _text(name: str) -> str:
    if name.endswith(".toml") or "/" in name:
        return files.read_text(name, toml.LIMIT_BYTES)
    if name not in names():
        raise UsageError(config.unknown("site", name, names()) + " (or name a .toml file)")
    return resources.files("hpctrain.cluster.slurm").joinpath("sites", f"{name}.toml").read_text()


def _check(site: Site, source: str) -> None:
    """Raise UsageError for text that sbatch or a shell would not read as one harmless word."""
    nodes = [kind for kind in (site.cpu, site.gpu) if kind]
    if not nodes:
        raise UsageError(
            f"[{source}] expected a table [cpu] or [gpu]: its nodes without and with GPUs"
        )
    parts: list[Site | Nodes] = [site, *nodes]
    for part in parts:
        for key, value in part.options.items():
            config.pick(VARIABLES, key, f"option of sbatch in {source}:")
            must_be_free(f"[{source}] {key}", key, value)
            must_be_plain(f"[{source}] {key}", value)
        for variable in part.environment:
            if not _VARIABLE.fullmatch(variable):
                raise UsageError(f"[{source}] environment: '{variable}' is no name of a variable")
    texts = [site.title, site.launcher, site.venv or "", *site.read, *site.notes]
    texts += [word for p in parts for word in (*p.modules, *p.environment.values())]
    for text in texts:
        if not text.isprintable():
            raise UsageError(
                f"[{source}] expected text without control characters, seen {files.brief(text)}"
            )
