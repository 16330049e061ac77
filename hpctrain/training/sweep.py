"""Sweeps of a recipe: the members of the product of settings, each checked before any starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.config import sweep
from hpctrain.core.config.sweep import Axes
from hpctrain.core.errors import UsageError
from hpctrain.core.files import brief
from hpctrain.core.run_files import sweep_folder
from hpctrain.core.run_files.sweep_folder import SweepFile
from hpctrain.training.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """A run of a sweep."""

    name: str  #: of its folder
    values: dict[str, str]  #: "table.key" -> text in TOML
    settings: tuple[str, ...]  #: all `table.key=value` of this run
    spec: Recipe


def read_members(
    settings: Iterable[str], load: Callable[[list[str]], Recipe], ranks: int | None = None
) -> list[Member]:
    """Return the members of a sweep, in order; empty if each setting has one value.

    `load` returns the recipe with `table.key=value` settings; `ranks`: of each member's job, None
    if unknown. Raises UsageError with the values of a member whose recipe is refused, or that is
    the same as another one, and for more than 1,000.
    """
    axes = sweep.read_axes(settings)
    if not axes.values:
        return []
    values = axes.combine()
    members: list[Member] = []
    for name, member_values in zip(sweep.name_members(values), values, strict=True):
        words = (*axes.fixed, *(f"{key}={value}" for key, value in member_values.items()))
        try:
            spec = load([*words])
            if ranks is not None:
                spec.must_fit(ranks)
        except UsageError as error:
            raise UsageError(f"--set {sweep.describe(member_values)}: {error}") from None
        members.append(Member(name, member_values, words, spec))
    _must_differ(members)
    _announce(axes, load)
    return members


def make_file(recipe: str, settings: Iterable[str], members: Iterable[Member]) -> SweepFile:
    """Return the contents of sweep.json of a sweep."""
    is_file = recipe.endswith(".toml") or "/" in recipe
    return SweepFile(
        str(Path(recipe).absolute()) if is_file else recipe,
        [*settings],
        [sweep_folder.Member(member.name, member.values) for member in members],
    )


def _must_differ(members: Iterable[Member]) -> None:
    """Raise UsageError if two members have the same recipe."""
    members_by_hash: dict[str, Member] = {}
    for member in members:
        other = members_by_hash.setdefault(member.spec.sha256, member)
        if other is not member:
            raise UsageError(
                f"two members of the sweep are the same: {sweep.describe(other.values)} and "
                f"{sweep.describe(member.values)}"
            )


def _announce(axes: Axes, load: Callable[[list[str]], Recipe]) -> None:
    """Log the keys of a sweep, and texts with commas that would also be one valid value."""
    log.info(sweep.announce(axes))
    for key, values in axes.values.items():
        text = f"{key}={','.join(values)}"
        settings = [f"{other}={texts[0]}" for other, texts in axes.values.items() if other != key]
        try:
            load([*axes.fixed, *settings, text])
        except UsageError:
            continue
        log.warning(
            "--set %s: values of a sweep; a text with commas stands in quotes, as '%s=\"a,b\"'",
            brief(text)[1:-1],
            key,
        )
