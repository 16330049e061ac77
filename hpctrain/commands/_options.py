"""Options that several commands have, the files that they name, and completion in shells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from glob import escape, glob
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete

from hpctrain.core.config.sweep import read_axes, split_values
from hpctrain.core.errors import UsageError
from hpctrain.core.run_files import sweep_folder
from hpctrain.core.strict_json import to_json

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
FILE_TYPE = click.Path(path_type=Path, dir_okay=False)
MISSING_PACKAGES_MESSAGE = "reports need matplotlib and jinja2; run: pip install 'hpctrain[report]'"


def _must_be_single(
    context: click.Context, parameter: click.Parameter, sets: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the settings; raise UsageError if a key has several values."""
    for key, values in read_axes(sets).values.items():
        raise UsageError(
            f"--set {key}: expected one value, seen {len(values)}: `hpctrain train` makes sweeps; "
            f"one text with commas stands in quotes: '{key}=\"a,b\"'"
        )
    return sets


set_option, single_set_option = (
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        callback=callback,
        help=f"Change a key of the recipe; conflicting keys are removed{more}.",
    )
    for callback, more in ((None, "; values between commas: a sweep"), (_must_be_single, ""))
)
recipe_argument = click.argument(
    "recipe",
    required=False,
    metavar="RECIPE | -- PROGRAM [ARGS]...",
    shell_complete=lambda *arguments: complete_recipes(*arguments),
)
iterations_option = click.option(
    "--iterations", default=20, show_default=True, metavar="N", help="Timed rounds."
)
json_option = click.option(
    "--json", type=FILE_TYPE, metavar="FILE", help="Write all rows and facts of the machine."
)
plot_option = click.option(
    "--plot", type=FILE_TYPE, metavar="FILE", help="Plot the rows: .png or .svg."
)
CompletionFunction = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def verbosity(context: click.Context) -> list[str]:
    """Return the -v and -q before a command, for the ranks that it starts."""
    outer_options = context.parent.params if context.parent else {}
    return [f"--{name}" for name in ("verbose", "quiet") if outer_options.get(name)]


def may_be_sweep(words: Iterable[str], folder: Path | None = None) -> bool:
    """Return whether a training may be a sweep: a word has values, or `folder` holds a sweep."""
    return any(len(split_values(word.partition("=")[2])) > 1 for word in words) or (
        folder is not None and sweep_folder.is_sweep(folder)
    )


def warm_up_option(default: int) -> Decorator:
    """Return the option of the rounds before the timed ones."""
    help_text = "Untimed rounds before these."
    return click.option(
        "--warm-up", default=default, show_default=True, metavar="N", help=help_text
    )


def add_options(*options: Decorator) -> Decorator:
    """Return the decorator that adds `options` to a command, in the order of its help."""
    return lambda command: reduce(lambda decorated, add: add(decorated), options[::-1], command)


@contextmanager
def report_packages() -> Iterator[None]:
    """Raise UsageError with the command to run if a package of reports cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"{MISSING_PACKAGES_MESSAGE} ({error})") from None


def write_results(
    content: dict[str, Any],
    json_file: Path | None,
    plot: Path | None,
    draw: Callable[[ModuleType, Path], None],
) -> None:
    """Write `content` to `json_file` and draw `plot`, where given; raise UsageError.

    `draw(plots, plot)`: by a function of tools/bench/plot.py, which needs matplotlib.
    """
    with report_packages():
        try:
            if json_file:
                json_file.write_text(to_json(content, indent=1) + "\n")
            if plot:
                draw(import_module("hpctrain.tools.bench.plot"), plot)
        except (OSError, ValueError) as error:
            raise UsageError(f"--json, --plot: cannot be written: {error}") from None


def complete_recipes(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the recipes that begin with `incomplete`, built-in ones and TOML files."""
    from hpctrain.training import recipe  # late, so that `launch --help` stays fast

    names = [*recipe.built_in(), *sorted(glob(f"{escape(incomplete)}*.toml"))]
    # An item of type "file" makes shells drop all preceding names, so it is returned alone.
    return _filter_by_prefix(incomplete, names) or [CompletionItem(incomplete, type="file")]


def complete_choices(names: Iterable[str]) -> CompletionFunction:
    """Return the completion of an option that takes one of `names`."""
    return lambda context, parameter, incomplete: _filter_by_prefix(incomplete, names)


def complete_command_line(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the completions for a command whose arguments are a command line of hpctrain."""
    words = [*(context.params.get("arguments") or ())]
    root = context.find_root().command
    return ShellComplete(root, {}, "hpctrain", "").get_completions(words, incomplete)


class ForwardingCommand(click.Command):
    """A command that runs the command line in its arguments and can complete it."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.params.get("arguments"):
            return complete_command_line(ctx, self.params[-1], incomplete)
        return super().shell_complete(ctx, incomplete)


class ProgramCommand(click.Command):
    """A command on RECIPE or, after `--`, on a program, which its function gets as `program`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = [*args, "--"].index("--")
        ctx.params["program"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


def _filter_by_prefix(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
