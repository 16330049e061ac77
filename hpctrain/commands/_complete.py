"""Shell completion of recipes, choices and nested command lines, in addition to click's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from glob import escape, glob

import click
from click.shell_completion import CompletionItem, ShellComplete

CompletionFunction = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


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


def _filter_by_prefix(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
