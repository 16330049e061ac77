"""What differs from cluster to cluster, read from TOML: options, modules, launcher, variables.

A profile becomes shell text twice. In a job that was rendered for a site it stands in the script;
as `site.env` it also exports the options of sbatch, which are read before any shell runs:

    . slurm/site.env && sbatch slurm/multi_node.sbatch
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hpctrain import config
from hpctrain.cluster.sbatch import VARIABLES, must_be_plain
from hpctrain.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LINE = 100


@config.options
class Site:
    """A cluster, or a part of it with one kind of node."""

    title: str
    read: list[str] = Field(default_factory=list)  #: the documents this was read from
    notes: list[str] = Field(default_factory=list)  #: what its users should know
    gpus_per_node: Annotated[int, Field(ge=0)] = 0  #: that hpctrain can use
    gpus_as: Literal["gpus-per-node", "gres"] = "gpus-per-node"  #: the option that asks for them
    tasks_per_node: Annotated[int, Field(ge=1)] = 1  #: of a job without GPUs
    cpus_per_task: Annotated[int, Field(ge=1)] = 1
    options: dict[str, str] = Field(default_factory=dict)  #: of sbatch
    servers: dict[str, str] = Field(default_factory=dict)  #: of sbatch, for nodes of servers
    modules: list[str] = Field(default_factory=list)
    launcher: str = "srun --kill-on-bad-exit=1"
    environment: dict[str, str] = Field(default_factory=dict)

    def setup(self) -> str:
        """Return shell text that makes a shell ready to start ranks here."""
        exports = {"HPCTRAIN_LAUNCHER": self.launcher, **self.environment}
        lines = [f"module load {shlex.join(self.modules)}"] if self.modules else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
        return "\n".join([*self._comments(), *lines])

    def env(self) -> str:
        """Return the text of a file site.env: options of sbatch as variables, then `setup`."""
        options = {**self.options, **gpu_options(self, self.gpus_per_node)}
        exports = [f"export {VARIABLES[k]}={shlex.quote(v)}" for k, v in options.items()]
        return "\n".join([*exports, self.setup()])

    def _comments(self) -> list[str]:
        seen = "Read from public documentation, not run there:" if self.read else ""
        return [f"# {line}" for line in (self.title, seen, *self.read, *self.notes) if line]


def gpu_options(site: Site, gpus: int) -> dict[str, str]:
    """Return the options of sbatch for `gpus` GPUs on each node, all of them seen by each task."""
    if not gpus:
        return {}
    ask = {"gres": f"gpu:{gpus}"} if site.gpus_as == "gres" else {"gpus-per-node": str(gpus)}
    return {**ask, "gpu-bind": "none"}


def names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    files = resources.files("hpctrain.cluster").joinpath("sites").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load(name: str) -> Site:
    """Return the profile `name`, or the one in file `name`.

    Raises UsageError that tells the nearest name, of a profile or of a key.
    """
    try:
        table = tomllib.loads(_text(name))
    except OSError as error:
        raise UsageError(f"site {name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"site {name} is not TOML: {error}") from None
    site = config.read(Site, table, f"site {name}")
    _check(site, name)
    return site


def _text(name: str) -> str:
    if name.endswith(".toml") or "/" in name:
        return Path(name).read_text()
    if name not in names():
        raise UsageError(config.unknown("site", name, names()) + " (or name a .toml file)")
    return resources.files("hpctrain.cluster").joinpath("sites", f"{name}.toml").read_text()


def _check(site: Site, name: str) -> None:
    """Raise UsageError for what sbatch or a shell would not take as one harmless word."""
    for key, value in [*site.options.items(), *site.servers.items()]:
        config.pick(VARIABLES, key, f"option of sbatch that site {name} can set:")
        must_be_plain(f"[site {name}] {key}", value)
    for variable in site.environment:
        if not _VARIABLE.fullmatch(variable):
            raise UsageError(f"[site {name}] environment: '{variable}' is no name of a variable")
    told = [site.title, *site.read, *site.notes, *site.modules, site.launcher]
    for text in [*told, *site.environment.values()]:
        if not text.isprintable():
            raise UsageError(
                f"[site {name}] a line without control characters is expected: {text!r}"
            )
