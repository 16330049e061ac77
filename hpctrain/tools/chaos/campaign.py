"""The file of a campaign: a TOML file, or lines of JSON, a case or a result each.

schema = 1
seed = 15
cases = 200
engines = ["allreduce", "ps-sync"]      # small built-in recipes, or:
recipes = ["my.toml"]                   # your own
ranks = [2, 3, 4]
launchers = ["launch", "elastic"]
spares = [0, 1]                         # of elastic jobs

[faults]
count = [1, 2]                          # per case
kinds = ["kill-rank", "kill-rank", "stop-rank", "failing-file"]
moments = ["step", "checkpoint"]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hpctrain.core import config, files
from hpctrain.core.config import toml
from hpctrain.core.errors import UsageError
from hpctrain.core.opening import NAMED
from hpctrain.data import resize_training_set
from hpctrain.tools.chaos import regimes
from hpctrain.tools.chaos.case import LIMIT_S, Case, Launcher, Table, read
from hpctrain.tools.chaos.regimes import REGIMES
from hpctrain.training import recipe as recipes

Kind = Literal[
    "kill-rank", "kill-two", "stop-rank", "signal-rank", "kill-launcher", "signal-launcher",
    "full-disk", "failing-file", "cut-link", "slow-link", "dead-host",
]  # fmt: skip
DrawnMoment = Literal["step", "checkpoint", "recovery", "start"]
NonEmpty = Field(min_length=1)
MAX_CASES = 1_000_000
LINES_LIMIT_BYTES = 1 << 20  #: of a case's line


@config.options
class FaultsOptions:
    """`[faults]`: kinds and moments of faults; a name that is repeated is drawn as much oftener."""

    kinds: Annotated[list[Kind], NonEmpty]
    count: Annotated[list[Annotated[int, Field(ge=0, le=1000)]], NonEmpty] = field(
        default_factory=lambda: [1]
    )
    moments: Annotated[list[DrawnMoment], NonEmpty] = field(default_factory=lambda: ["step"])
    #: If given, elastic jobs suffer a fault every so many seconds, `count` in all.
    period_s: Annotated[float, Field(gt=0)] | None = None
    delay_ms: Annotated[float, Field(ge=0)] = 12.0  #: largest delay after the moment
    disk_kib: list[int] = field(default_factory=lambda: [16, 240])  #: smallest and largest disk


@config.options
class LimitsOptions:
    """`[limits]` of time."""

    attempt_s: Annotated[float, Field(gt=0)] = LIMIT_S  #: an attempt that takes longer has hung
    hang_s: Annotated[float, Field(gt=0)] = 3.0  #: `run.timeout_s` where a rank or link stops


@config.options
class CampaignOptions:
    """The keys of a campaign's file."""

    faults: FaultsOptions
    limits: LimitsOptions = field(default_factory=LimitsOptions)
    engines: list[str] = field(default_factory=list)  #: names of small built-in recipes
    recipes: list[str] = field(default_factory=list)  #: files, or names of built-in recipes
    set: list[str] = field(default_factory=list)  #: changes of `recipes`, as `train --set`
    ranks: Annotated[list[Annotated[int, Field(ge=1)]], NonEmpty]
    spares: Annotated[list[Annotated[int, Field(ge=0)]], NonEmpty] = field(
        default_factory=lambda: [0]
    )
    launchers: Annotated[list[Launcher], NonEmpty] = field(default_factory=lambda: ["launch"])
    launcher_options: list[str] = field(default_factory=list)
    seed: Annotated[int, Field(ge=0)] = 0
    cases: Annotated[int, Field(ge=1, le=MAX_CASES)] = 100


@dataclass(frozen=True)
class Subject:
    """A recipe under test; `recipe_for(setting)` gives its tables."""

    name: str
    recipe_for: Callable[[int], Table]
    fits: Callable[[int], bool]  #: whether a number of ranks can train it
    epoch_samples: int
    batch_for: Callable[[int], int]  #: ranks -> samples per step


@dataclass(frozen=True)
class Campaign:
    """A campaign, checked: `subjects` are its engines and recipes."""

    name: str
    options: CampaignOptions
    subjects: list[Subject]


def load(path: Path, changes: Mapping[str, Any] | None = None) -> Campaign:
    """Return the campaign of a TOML file, with `changes` of keys.

    Raises UsageError with all faults of a table.
    """
    tables = toml.parse(files.read_text(path, toml.LIMIT_BYTES, NAMED), str(path))
    toml.must_be_plain(tables, str(path))
    if tables.pop("schema", None) != 1:
        raise UsageError(f"{path}: expected 'schema = 1', the format that this version reads")
    return make(path.stem, {**tables, **(changes or {})}, path.parent)


def make(name: str, tables: Mapping[str, Any], folder: Path = Path()) -> Campaign:
    """Return the campaign of `tables`; recipes that it names lie in `folder`."""
    option_classes: dict[str, type[Any]] = {"faults": FaultsOptions, "limits": LimitsOptions}
    nested_options = {
        key: config.read(cls, tables.get(key, {}), key)
        for key, cls in option_classes.items()
        if key in tables
    }
    options = config.read(CampaignOptions, {**tables, **nested_options}, "campaign")
    if not options.engines and not options.recipes:
        raise UsageError("a campaign needs engines = [...] or recipes = [...], seen neither")
    subjects = [_built_in(engine) for engine in options.engines]
    subjects += [_user_subject(recipe, options.set, folder) for recipe in options.recipes]
    campaign = Campaign(name, options, subjects)
    _check_campaign(campaign)
    return campaign


def read_lines(path: Path) -> list[Case]:
    """Return the cases of a file of lines, cases or results; of a case its last line counts."""

    def read_case(table: dict[str, Any]) -> Case | None:
        return None if "campaign" in table else read(json.dumps(table))

    cases = files.read_log(path, read_case, LINES_LIMIT_BYTES, NAMED).entries
    return list({(case.seed, case.index): case for case in cases if case}.values())


def _built_in(name: str) -> Subject:
    regime = config.pick(REGIMES, name, "campaign engines: name")
    return Subject(
        name,
        lambda setting: regimes.make_recipe(name, setting),
        lambda ranks: regime.smallest <= ranks <= regime.largest,
        Case.epoch_samples,
        lambda ranks: Case.batch,
    )


def _user_subject(name: str, settings: list[str], folder: Path) -> Subject:
    """Return a user's recipe, with its length in steps instead of epochs."""
    path = folder / name if name.endswith(".toml") else name
    spec = recipes.load(str(path), settings)
    samples = len(resize_training_set(spec.data.load(spec.run.seed), spec.run.epoch_samples).train)

    def tables(setting: int) -> Table:
        run = {key: value for key, value in spec.tables["run"].items() if key != "epochs"}
        steps_per_epoch = -(-samples // spec.batch.size(1))
        steps = spec.run.steps or (spec.run.epochs or 1) * steps_per_epoch
        return {**spec.tables, "run": {**run, "steps": steps}}

    return Subject(name, tables, partial(regimes.can_train, spec), samples,
                   lambda ranks: spec.batch.size(spec.workers(ranks)))  # fmt: skip


def _check_campaign(campaign: Campaign) -> None:
    """Raise UsageError for a campaign with a case that could not be drawn."""
    options = campaign.options
    for subject in campaign.subjects:
        if not any(subject.fits(ranks) for ranks in options.ranks):
            raise UsageError(f"campaign ranks: none of {options.ranks} can train {subject.name}")
    on_netlab = {"cut-link", "slow-link", "dead-host"} & {*options.faults.kinds}
    if on_netlab and options.launchers != ["netlab"]:
        raise UsageError(
            f"campaign faults.kinds: {', '.join(sorted(on_netlab))}: expected launchers = "
            f"['netlab'] beside it, seen {options.launchers}"
        )
    min_kib, *further_kib = options.faults.disk_kib
    if len(further_kib) != 1 or not 0 < min_kib <= further_kib[0]:
        raise UsageError(
            "campaign faults.disk_kib: expected [smallest, largest], seen "
            f"{options.faults.disk_kib}"
        )
