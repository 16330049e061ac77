"""`hpctrain recipe`: lists, shows, begins, checks and compares recipes; no MPI is started."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

import click
import tomli_w

from hpctrain import data
from hpctrain.commands import _options
from hpctrain.commands._lazy import WholeGroup
from hpctrain.commands._options import complete_recipes
from hpctrain.core import atomic
from hpctrain.core.config import paths, toml
from hpctrain.core.config.usercode import sources
from hpctrain.core.errors import UsageError
from hpctrain.core.printing import say
from hpctrain.tools.report import comparison
from hpctrain.training import recipe as recipes
from hpctrain.training.recipe_keys import list_all_keys
from hpctrain.training.sweep import read_members

EPILOG = """\b
Examples:
  hpctrain recipe list
  hpctrain recipe show digits --all-keys
  hpctrain recipe new my.toml --from mnist && hpctrain recipe check my.toml
  hpctrain recipe diff mnist my.toml
"""
RECIPE = click.argument("name", metavar="RECIPE", shell_complete=complete_recipes)


@click.group(cls=WholeGroup, epilog=EPILOG)
def recipe() -> None:
    """List, show, begin, check or compare recipes."""


@recipe.command("list")
def list_recipes() -> None:
    """Print the built-in recipes, a line each; on a narrow terminal more."""
    recipe_names = recipes.built_in()
    indent = " " * (max(map(len, recipe_names)) + 2)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    for name in recipe_names:
        description = recipes.source(name).splitlines()[0].removeprefix("# ")
        text = f"{name:{len(indent)}}{description}"
        say(textwrap.fill(text, width, subsequent_indent=indent))


@recipe.command()
@RECIPE
@click.option("--all-keys", is_flag=True, help="Also the keys that are not set, with defaults.")
def show(name: str, all_keys: bool) -> None:
    """Print RECIPE as TOML, merged with the recipe that it extends."""
    text = recipes.source(name)
    if all_keys:
        text = tomli_w.dumps(list_all_keys(recipes.load(name)))
    elif "extends" in toml.parse(text, f"recipe {name}"):
        tables = recipes.read_tables(name)
        tables.pop(paths.PATHS, None)
        text = tomli_w.dumps(tables)
    say(text.replace("\r\n", "\n"), end="", tabs=True)


@recipe.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--from", "base", default="digits", metavar="RECIPE", shell_complete=complete_recipes,
    help="The recipe to begin with; default: digits.",
)  # fmt: skip
def new(file: Path, base: str) -> None:
    """Write a copy of a recipe into FILE, to be changed."""
    if file.suffix != ".toml":
        raise UsageError(f"expected a name that ends with .toml, seen {file}")
    if file.exists():
        raise UsageError(f"{file} is there already; name another file")
    if (names := _relative_names(base)) and file.parent.resolve() != Path(base).parent.resolve():
        raise UsageError(
            f"{base} names {', '.join(names)} relative to its own folder, which a copy in another "
            f"one would not find: expected a file in {Path(base).parent}, seen {file}"
        )
    text = re.sub(
        r'^name = ".*"$', f'name = "{file.stem}"', recipes.source(base), count=1, flags=re.M
    )
    try:
        atomic.replace(file, text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    say(f"wrote {file}, a copy of {base}")
    say(f"every key with its default: hpctrain recipe show {file} --all-keys")


def _relative_names(name: str) -> list[str]:
    """Return the names in a recipe that are relative to its folder: files, modules, recipes."""
    spec, tables = recipes.load(name), toml.parse(recipes.source(name), f"recipe {name}")
    tables.pop(paths.PATHS, None)
    base, init = tables.get("extends", ""), tables.get("model", {}).get("init", "")
    paths.make_absolute(tables, data.path_keys(spec.tables), Path(name).parent)
    files = [*tables.get(paths.PATHS, {}).values(), init, *{base} - {*recipes.built_in()}]
    modules = [] if "code" in tables else [*spec.code.sha256]
    folder = Path(spec.code.folder).resolve()
    own_modules = [
        m for m in modules if folder in sources(m, spec.code.folder)[m].resolve().parents
    ]
    return [*(file for file in files if file and not os.path.isabs(file)), *own_modules]


@recipe.command()
@RECIPE
@_options.set_option
def check(name: str, sets: tuple[str, ...]) -> None:
    """Check RECIPE, its data and its model without training; the exit code is 2 if refused.

    Of a sweep each recipe is checked, and data and model of the first. Of files it reads labels,
    and a few samples of each set, the first and the last among them. Functions of your own are
    not called; hpctrain train RECIPE --dry-run calls them.
    """
    from hpctrain.training.dry_run import examine  # late: other subcommands read no data

    members = read_members(sets, partial(recipes.load, name))
    spec = members[0].spec if members else recipes.load(name, sets)
    text, unread_text = examine(spec)
    say(f"{name}: {spec.run.name} is a valid recipe: {text}")
    if unread_text:
        say(f"not looked at: the values of {unread_text}; each is checked when it is read")
    say(f"memory and time per step: hpctrain train {name} --dry-run")


@recipe.command()
@click.argument("first", metavar="RECIPE", shell_complete=complete_recipes)
@click.argument("second", metavar="RECIPE", shell_complete=complete_recipes)
def diff(first: str, second: str) -> None:
    """Print the keys in which two recipes differ, defaults included."""
    tables = [list_all_keys(recipes.load(name)) for name in (first, second)]
    differences = comparison.find_differences(tables)
    if not differences:
        say("no key differs")
        return
    comparison.print_tables({"runs": {first: {}, second: {}}, "recipes": differences})
