"""Shell completion: the words that may follow on a command line, beyond click's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from glob import escape, glob

import click
from click.shell_completion import CompletionItem, ShellComplete

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def recipes(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the recipes that begin with `incomplete`, built-in ones and TOML files."""
    from hpctrain.training import recipe  # `launch --help` stays quick

    names = [*recipe.built_in(), *sorted(glob(f"{escape(incomplete)}*.toml"))]
    # Shells drop the names that stand before an item of this type.
    return _starting_with(incomplete, names) or [CompletionItem(incomplete, type="file")]


def choices(names: Iterable[str]) -> Complete:
    """Return the completion of an option that takes one of `names`."""
    return lambda context, parameter, incomplete: _starting_with(incomplete, names)


def command_line(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the completions for a command whose arguments are a command line of hpctrain."""
    words = [*(context.params.get("arguments") or ())]
    root = context.find_root().command
    return ShellComplete(root, {}, "hpctrain", "").get_completions(words, incomplete)


class Forwarding(click.Command):
    """A command that runs the command line in its arguments, and completes its options."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if ctx.params.get("arguments"):
            return command_line(ctx, self.params[-1], incomplete)
        return super().shell_complete(ctx, incomplete)


def _starting_with(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
